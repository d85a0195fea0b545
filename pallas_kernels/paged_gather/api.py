"""Pages to dense keys and values: contract, validation and the ordered table of implementations. It computes nothing itself."""

import jax

from pallas_kernels.contract import ArrayLike, check_number, check_pages, check_rank, dtype_name
from pallas_kernels.dispatch import (
    Choice,
    ContractError,
    Implementation,
    Target,
    choose,
    current_target,
    implementation_scope,
    supports_all,
    traced_once,
)
from pallas_kernels.paged_gather import kernel_xla, reference
from pallas_kernels.paged_gather.config import GatherSpec

OP = "paged_gather"


def paged_gather(
    k_pages: jax.Array,                 # [P, K, Z, H]
    v_pages: jax.Array,                 # [P, K, Z, H]
    page_table: jax.Array,              # [B, M]
    kv_lens: jax.Array,                 # [B]
    *,
    max_len: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:       # ([B, max_len, K, H], [B, max_len, K, H])
    """The keys and values of B sequences as plain arrays, for whatever knows no pages: `flash_attention`, a check, another stack.

        k[b, s] = slot s % Z of page page_table[b, s // Z]      s < kv_lens[b], and 0 from there on

    At the edges: a row of kv_len 0 is 0 throughout; a row longer than max_len is cut off there; max_len may pass M * Z. Contents of the
    null page, of pages that no row names and of slots at or past a row's kv_len never reach the result, NaN included.

    Args:
      k_pages: [P, K, Z, H] key pages, float32, bfloat16 or float16; Z is a multiple of 16 from 16 to 128.
      v_pages: [P, K, Z, H] value pages of the same dtype.
      page_table: [B, M] int32 page numbers in [0, P).
      kv_lens: [B] int32 tokens of each row, at most M * Z.
      max_len: tokens of each row in the result.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      Keys and values, each [B, max_len, K, H] in the pages' dtype.
    Raises:
      ContractError: shapes, dtypes or static values that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: pages as in 'Efficient Memory Management for Large Language Model Serving with PagedAttention',
      https://arxiv.org/abs/2309.06180, section 4.
    """
    spec = gather_spec(k_pages, v_pages, page_table, kv_lens, max_len=max_len)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return traced_once(impl.run, spec=spec, target=target)(k_pages, v_pages, page_table, kv_lens)


def paged_gather_choice(spec: GatherSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `paged_gather`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def gather_spec(k_pages: ArrayLike, v_pages: ArrayLike, page_table: ArrayLike, kv_lens: ArrayLike, *, max_len: int) -> GatherSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `paged_gather`.
    """
    check_pages(OP, k_pages, v_pages)
    for name, array, dims in (("page_table", page_table, "BM"), ("kv_lens", kv_lens, "B")):
        check_rank(OP, name, array, dims)
        if dtype_name(array) != "int32":
            raise ContractError(f"{OP}: {name} has dtype {dtype_name(array)}: must be int32; cast it.")
    if page_table.shape[0] != kv_lens.shape[0]:
        raise ContractError(f"{OP}: page_table {list(page_table.shape)}, [B, M], and kv_lens {list(kv_lens.shape)}, [B], differ in B: "
                            "give one length a row.")
    check_number(OP, "max_len", max_len, least=1, open_end=False, integer=True)
    return GatherSpec(num_rows=page_table.shape[0], max_len=int(max_len), num_kv_heads=k_pages.shape[1], head_dim=k_pages.shape[3],
                      page_size=k_pages.shape[2], pages_per_seq=page_table.shape[1], dtype=dtype_name(k_pages))


def _run_xla(*arrays: jax.Array, spec: GatherSpec, target: Target) -> tuple[jax.Array, jax.Array]:
    return kernel_xla.paged_gather(*arrays, max_len=spec.max_len)


def _run_reference(*arrays: jax.Array, spec: GatherSpec, target: Target) -> tuple[jax.Array, jax.Array]:
    return reference.paged_gather(*arrays, max_len=spec.max_len)


IMPLS: tuple[Implementation[GatherSpec], ...] = (
    Implementation(name="xla", reason="one gather a pool, any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: whole tables, row by row", supports=supports_all, run=_run_reference),
)
