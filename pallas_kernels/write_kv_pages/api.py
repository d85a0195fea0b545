"""Writing new keys and values into their pages: contract, validation and the ordered table of implementations."""

import jax

from pallas_kernels.contract import ArrayLike, check_float, check_pages, check_rank, check_rows, dtype_name
from pallas_kernels.dispatch import (
    Choice,
    ContractError,
    Implementation,
    Target,
    choose,
    current_target,
    implementation_scope,
    supports_all,
    supports_unless,
    traced_once,
)
from pallas_kernels.write_kv_pages import kernel_xla, reference
from pallas_kernels.write_kv_pages.config import WriteSpec, mosaic_refusal

OP = "write_kv_pages"


def write_kv_pages(
    k: jax.Array,           # [T, K, H]
    v: jax.Array,           # [T, K, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # ([P, K, Z, H], [P, K, Z, H])
    """Writes the new tokens' keys and values into their rows' pages, in place where the pools are DONATED to the enclosing jit.

    Token t of row b, cu_q_lens[b] <= t < cu_q_lens[b + 1], has position pos = kv_lens[b] - cu_q_lens[b + 1] + t, and goes to slot
    pos % Z of page page_table[b, pos // Z]. All else in the pools stays as it is, but for the null page 0.

    At the edges: empty rows write nothing. Tokens from cu_q_lens[B] on are padding and land in page 0, whose contents are undefined.
    Two tokens of one call must not name the same slot of another page; the page allocator sees to that.

    Args:
      k: [T, K, H] float32, bfloat16 or float16 keys, rows packed in order, padding tokens last; cast to the pages' dtype.
      v: [T, K, H] values of the same dtype.
      k_pages: [P, K, Z, H] key pages; Z is a multiple of 16 from 16 to 128.
      v_pages: [P, K, Z, H] value pages of the same dtype.
      page_table: [B, M] int32 page numbers in [0, P).
      cu_q_lens: [B + 1] int32, ascending from 0; cu_q_lens[B] <= T.
      kv_lens: [B] int32 tokens of each row, the new ones included; at most M * Z.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      The two pools with the new tokens in them.
    Raises:
      ContractError: shapes or dtypes that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: 'Efficient Memory Management for Large Language Model Serving with PagedAttention', https://arxiv.org/abs/2309.06180, section 4.
    """
    spec = write_spec(k, v, k_pages, v_pages, page_table, cu_q_lens, kv_lens)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return traced_once(impl.run, spec=spec, target=target)(k, v, k_pages, v_pages, page_table, cu_q_lens, kv_lens)


def write_kv_pages_choice(spec: WriteSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `write_kv_pages`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def write_spec(k: ArrayLike, v: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike, page_table: ArrayLike, cu_q_lens: ArrayLike,
               kv_lens: ArrayLike) -> WriteSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `write_kv_pages`.
    """
    check_rank(OP, "k", k, "TKH")
    check_float(OP, "k", k)
    if k.shape != v.shape or dtype_name(k) != dtype_name(v):
        raise ContractError(f"{OP}: k is {dtype_name(k)}{list(k.shape)} and v {dtype_name(v)}{list(v.shape)}: "
                            "both must have one shape [T, K, H] and one dtype.")
    check_pages(OP, k_pages, v_pages)
    check_rows(OP, page_table, cu_q_lens, kv_lens)
    if (k.shape[1], k.shape[2]) != (k_pages.shape[1], k_pages.shape[3]):
        raise ContractError(f"{OP}: k {list(k.shape)}, [T, K, H], and k_pages {list(k_pages.shape)}, [P, K, Z, H], differ in K or H: "
                            "allocate the pool for this model's KV heads and head dim.")
    return WriteSpec(num_tokens=k.shape[0], num_rows=page_table.shape[0], num_kv_heads=k.shape[1], head_dim=k.shape[2],
                     page_size=k_pages.shape[2], pages_per_seq=page_table.shape[1], dtype=dtype_name(k), kv_dtype=dtype_name(k_pages))


def _run_mosaic(*arrays: jax.Array, spec: WriteSpec, target: Target) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.write_kv_pages import kernel_mosaic  # imported late: Pallas takes as long as jax to import

    return kernel_mosaic.write_kv_pages(*arrays, interpret=target.interpret)


def _run_xla(*arrays: jax.Array, spec: WriteSpec, target: Target) -> tuple[jax.Array, jax.Array]:
    return kernel_xla.write_kv_pages(*arrays)


def _run_reference(*arrays: jax.Array, spec: WriteSpec, target: Target) -> tuple[jax.Array, jax.Array]:
    return reference.write_kv_pages(*arrays)


IMPLS: tuple[Implementation[WriteSpec], ...] = (
    Implementation(name="mosaic", reason="both pools in one launch, sm_80 and sm_90",
                   supports=supports_unless(mosaic_refusal), run=_run_mosaic),
    Implementation(name="xla", reason="one scatter a pool, any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: one token after another", supports=supports_all, run=_run_reference),
)
