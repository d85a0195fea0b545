"""Rotating queries and keys and writing keys and values into their pages: contract, validation, ordered table of implementations."""

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
    lowered_once,
    supports_all,
    supports_unless,
    traced_once,
)
from pallas_kernels.rotary_kv_write import kernel_xla, reference
from pallas_kernels.rotary_kv_write.config import RotaryWriteSpec, mosaic_refusal

OP = "rotary_kv_write"


def rotary_kv_write(
    qkv: jax.Array,         # [T, K, G + 2, H]
    query_cos: jax.Array,   # [T, H // 2]
    query_sin: jax.Array,   # [T, H // 2]
    key_cos: jax.Array,     # [T, H // 2]
    key_sin: jax.Array,     # [T, H // 2]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # ([T, N, H], [P, K, Z, H], [P, K, Z, H])
    """Everything between the projection of new tokens and attention over pages: rotary embedding, then `write_kv_pages`.

    A head x turns into [x1 cos - x2 sin, x2 cos + x1 sin], x1 and x2 its halves, in float32 and rounded once. Values do not turn. Where a
    key and a value go, which pools are written in place, and what padding does: see `write_kv_pages`. Queries of padding tokens mean
    nothing.

    Args:
      qkv: [T, K, G + 2, H] float32, bfloat16 or float16; of each KV head its G query heads, its key, its value.
      query_cos: [T, H // 2] float32, and query_sin: what queries turn by, scaling of queries included.
      query_sin: [T, H // 2] float32.
      key_cos: [T, H // 2] float32, and key_sin: what keys turn by.
      key_sin: [T, H // 2] float32.
      k_pages: [P, K, Z, H] key pages; Z is a multiple of 16 from 16 to 128. DONATE them to the enclosing jit.
      v_pages: [P, K, Z, H] value pages of the same dtype.
      page_table: [B, M] int32 page numbers in [0, P).
      cu_q_lens: [B + 1] int32, ascending from 0; cu_q_lens[B] <= T.
      kv_lens: [B] int32 tokens of each row, the new ones included; at most M * Z.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      The rotated queries [T, N, H], N = K * G, in qkv's dtype, and the two pools with the new tokens in them.
    Raises:
      ContractError: shapes or dtypes that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: RoFormer, https://arxiv.org/abs/2104.09864, eq. 15, on halves as in `rotate_half` of transformers; pages as in `write_kv_pages`.
    """
    spec = rotary_write_spec(qkv, query_cos, query_sin, key_cos, key_sin, k_pages, v_pages, page_table, cu_q_lens, kv_lens)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return traced_once(impl.run, spec=spec, target=target)(
            qkv, query_cos, query_sin, key_cos, key_sin, k_pages, v_pages, page_table, cu_q_lens, kv_lens)


def rotary_kv_write_choice(spec: RotaryWriteSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `rotary_kv_write`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def rotary_write_spec(qkv: ArrayLike, query_cos: ArrayLike, query_sin: ArrayLike, key_cos: ArrayLike, key_sin: ArrayLike,
                      k_pages: ArrayLike, v_pages: ArrayLike, page_table: ArrayLike, cu_q_lens: ArrayLike,
                      kv_lens: ArrayLike) -> RotaryWriteSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `rotary_kv_write`.
    """
    check_rank(OP, "qkv", qkv, "TKGH")
    check_float(OP, "qkv", qkv)
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    if members < 3 or head_dim % 2:
        raise ContractError(f"{OP}: qkv {list(qkv.shape)}, [T, K, G + 2, H], must hold at least one query, a key and a value a KV head, of an "
                            "even head dim: stack them along the third dimension.")
    for name, turns in (("query_cos", query_cos), ("query_sin", query_sin), ("key_cos", key_cos), ("key_sin", key_sin)):
        if tuple(turns.shape) != (num_tokens, head_dim // 2) or dtype_name(turns) != "float32":
            raise ContractError(f"{OP}: {name} is {dtype_name(turns)}{list(turns.shape)}: must be float32[T, H // 2] = "
                                f"float32[{num_tokens}, {head_dim // 2}].")
    check_pages(OP, k_pages, v_pages)
    check_rows(OP, page_table, cu_q_lens, kv_lens)
    if (num_kv_heads, head_dim) != (k_pages.shape[1], k_pages.shape[3]):
        raise ContractError(f"{OP}: qkv {list(qkv.shape)}, [T, K, G + 2, H], and k_pages {list(k_pages.shape)}, [P, K, Z, H], differ in K "
                            "or H: allocate the pool for this model's KV heads and head dim.")
    return RotaryWriteSpec(
        num_tokens=num_tokens, num_rows=page_table.shape[0], num_kv_heads=num_kv_heads, num_groups=members - 2, head_dim=head_dim,
        page_size=k_pages.shape[2], pages_per_seq=page_table.shape[1], dtype=dtype_name(qkv), kv_dtype=dtype_name(k_pages))


@lowered_once
def _run_mosaic(*arrays: jax.Array, spec: RotaryWriteSpec, target: Target) -> tuple[jax.Array, jax.Array, jax.Array]:
    from pallas_kernels.rotary_kv_write import kernel_mosaic  # imported late: Pallas takes as long as jax to import

    return kernel_mosaic.rotary_kv_write(*arrays, interpret=target.interpret)


def _run_xla(*arrays: jax.Array, spec: RotaryWriteSpec, target: Target) -> tuple[jax.Array, jax.Array, jax.Array]:
    return kernel_xla.rotary_kv_write(*arrays)


def _run_reference(*arrays: jax.Array, spec: RotaryWriteSpec, target: Target) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reference.rotary_kv_write(*arrays)


IMPLS: tuple[Implementation[RotaryWriteSpec], ...] = (
    Implementation(name="mosaic", reason="rotation and both pools in one launch, sm_80 and sm_90", supports=supports_unless(mosaic_refusal),
                   run=_run_mosaic),
    Implementation(name="xla", reason="XLA fuses the rotation and scatters into each pool, any shape, CPU and GPU", supports=supports_all,
                   run=_run_xla),
    Implementation(name="reference", reason="the oracle: one token after another", supports=supports_all, run=_run_reference),
)
