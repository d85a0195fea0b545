"""RMSNorm. Only parameters and the formula."""

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels


@jax.named_scope("rms_norm")
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps), rounded to x.dtype, then times weight.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.

    Returns:
      [..., D] in x.dtype. The statistics are float32; a row of zeros stays zero.

    Source: arXiv 1910.07467; the order of rounding is that of `LlamaRMSNorm` in transformers.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Holds weight [D]."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)

    def of_sum(self, x: jax.Array, residual: jax.Array, *, implementation: str | None) -> tuple[jax.Array, jax.Array]:
        """(norm of x + residual, x + residual), each [T, D], of x [T, D] or of parts of it [P, T, D]: one pass where
        pallas_kernels.rms_norm has a kernel for it, or by the implementation of it that is named."""
        found = pallas_kernels.rms_norm(x, self.weight[...], residual, eps=self.eps, implementation=implementation)
        assert isinstance(found, tuple)
        return found
