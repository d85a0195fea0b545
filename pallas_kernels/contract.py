"""Checks shared by the ops on paged keys and values. Static facts only: it never looks at an array's contents."""

from typing import Any

import jax
import numpy as np

from pallas_kernels.dispatch import ContractError

MIN_PAGE_SIZE = 16
MAX_PAGE_SIZE = 128
PAGE_SIZE_STEP = 16
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)

type ArrayLike = jax.Array | jax.ShapeDtypeStruct | np.ndarray[Any, Any]


def dtype_name(array: ArrayLike) -> str:
    """'bfloat16', 'int32', ... of an array or an abstract value."""
    return np.dtype(array.dtype).name


def check_rank(op: str, name: str, array: ArrayLike, dims: str) -> None:
    """Requires as many dimensions as `dims` has letters, none of them 0.

    Raises:
      ContractError: another rank, or a dimension of 0.
    """
    layout = f"[{', '.join(dims)}]"
    if len(array.shape) != len(dims):
        raise ContractError(f"{op}: {name} has shape {array.shape}: must be {layout}, {len(dims)} dimensions.")
    if 0 in array.shape:
        raise ContractError(f"{op}: {name} has shape {array.shape}, {layout}: every dimension must be at least 1; pad to a bucket.")


def check_float(op: str, name: str, array: ArrayLike) -> None:
    """Requires one of FLOAT_DTYPES.

    Raises:
      ContractError: another dtype.
    """
    if dtype_name(array) not in FLOAT_DTYPES:
        raise ContractError(f"{op}: {name} has dtype {dtype_name(array)}: must be one of {', '.join(FLOAT_DTYPES)}; cast it.")


def check_pages(op: str, k_pages: ArrayLike, v_pages: ArrayLike) -> None:
    """Requires two pools [P, K, Z, H] of one shape and float dtype whose page size Z is 16, 32, ... 128.

    Raises:
      ContractError: shapes, dtypes or page size differ from that.
    """
    check_rank(op, "k_pages", k_pages, "PKZH")
    check_float(op, "k_pages", k_pages)
    if k_pages.shape != v_pages.shape or dtype_name(k_pages) != dtype_name(v_pages):
        raise ContractError(f"{op}: k_pages is {dtype_name(k_pages)}{list(k_pages.shape)} and v_pages {dtype_name(v_pages)}"
                            f"{list(v_pages.shape)}: both must have one shape [P, K, Z, H] and one dtype.")
    page_size = k_pages.shape[2]
    if page_size % PAGE_SIZE_STEP or not MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE:
        raise ContractError(f"{op}: pages of {page_size} tokens (k_pages {list(k_pages.shape)}, [P, K, Z, H]): the page size Z must be "
                            f"a multiple of {PAGE_SIZE_STEP} from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}; "
                            "allocate the pool with another page size.")


def check_rows(op: str, page_table: ArrayLike, cu_q_lens: ArrayLike, kv_lens: ArrayLike) -> None:
    """Requires int32 page_table [B, M], cu_q_lens [B + 1] and kv_lens [B] of one batch size.

    Raises:
      ContractError: another rank, dtype or batch size.
    """
    for name, array, dims in (("page_table", page_table, "BM"), ("cu_q_lens", cu_q_lens, "B"), ("kv_lens", kv_lens, "B")):
        check_rank(op, name, array, dims)
        if dtype_name(array) != "int32":
            raise ContractError(f"{op}: {name} has dtype {dtype_name(array)}: must be int32; cast it.")
    num_rows = page_table.shape[0]
    if cu_q_lens.shape[0] != num_rows + 1 or kv_lens.shape[0] != num_rows:
        raise ContractError(f"{op}: page_table {list(page_table.shape)} has B = {num_rows} rows, cu_q_lens {list(cu_q_lens.shape)} and "
                            f"kv_lens {list(kv_lens.shape)}: must be [B + 1] = [{num_rows + 1}] and [B] = [{num_rows}].")


def check_number(op: str, name: str, value: Any, *, least: float, open_end: bool, integer: bool) -> None:
    """Requires a finite Python number at least `least`, or above it where `open_end`, and within int32 or float32.

    Raises:
      ContractError: not such a number, an array or a tracer included: what is static must be known when tracing.
    """
    kinds: tuple[Any, ...] = (int, np.integer) if integer else (int, float, np.integer, np.floating)
    limit = INT32_MAX if integer else FLOAT32_MAX  # what the device computes with
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= limit
    if not is_number or value < least or (open_end and value == least):
        kind, sign = ("a Python integer" if integer else "a finite Python number"), (">" if open_end else ">=")
        raise ContractError(f"{op}: {name} = {value!r:.100}: must be {kind} {sign} {least}, and at most {limit}.")
