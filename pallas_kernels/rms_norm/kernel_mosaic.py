"""RMSNorm in Mosaic GPU, sm_80 and sm_90: one block of 128 threads a row, which it reads once. It validates nothing: api.py has."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic


def rms_norm(
    x: jax.Array,                # [T, D], or float32 parts [P, T, D]
    weight: jax.Array,           # [D]
    residual: jax.Array | None,  # [T, D]
    *,
    eps: float,
    vector: int,
    asks_for_weight_first: bool,
    interpret: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See api.rms_norm. `vector` neighbouring values a thread; `interpret` runs it on the CPU, slowly, for tests.

    The weight is the latest to come, for no kernel just wrote it, and what is asked for after a sum over threads waits for the sum.
    """
    num_tokens, dim = x.shape[-2:]
    num_parts, dtype = x.shape[0] if x.ndim > len("TD") else 0, (x if residual is None else residual).dtype
    layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=vector)

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)  # sm_80 has no 16-bit bfloat16 arithmetic

    def body(*refs: Any) -> None:
        *inputs, weight_ref, out_ref = refs[:len(refs) - (residual is not None)]
        row = lax.axis_index("row")
        weight = plgpu.load(weight_ref, layout=layout) if asks_for_weight_first else None
        if num_parts:
            values = rounded(functools.reduce(operator.add, (plgpu.load(inputs[0].at[i, row], layout=layout) for i in range(num_parts))))
        else:
            values = plgpu.load(inputs[0].at[row], layout=layout).astype(jnp.float32)
        if residual is not None:
            values = rounded(values + plgpu.load(inputs[1].at[row], layout=layout).astype(jnp.float32))
            refs[-1][row] = values.astype(dtype)
        scale = lax.rsqrt(jnp.sum(values * values) / dim + eps)
        out_ref[row] = (rounded(values * scale) * rounded(plgpu.load(weight_ref, layout=layout) if weight is None else weight)).astype(dtype)

    struct = jax.ShapeDtypeStruct((num_tokens, dim), dtype)
    inputs = (x,) if residual is None else (x, residual)
    return mosaic.kernel(body, out_type=struct if residual is None else (struct, struct), grid=(num_tokens,), grid_names=("row",),
                        kernel_name="rms_norm", interpret=interpret)(*inputs, weight)
