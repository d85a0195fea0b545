"""The attention block and the two contexts it runs in: pages (serving) and a dense batch (teacher forcing).

A context is a pytree that owns keys, values and lengths; the block only projects and asks it to rotate and attend.
"""

import dataclasses
import functools
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.forced import NOTHING_FORCED, ForcedKernels
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rotary import RotaryAngles, rotate
from jaxinfer.quant import FormatOf, not_quantised
from jaxinfer.state import KVCache
from pallas_kernels import ragged_paged_attention, rotary_kv_write


class AttentionContext(Protocol):
    """What the model needs to know about the batch it runs in."""

    @property
    def forced(self) -> ForcedKernels:
        """The implementations that the batch's ops are asked for by name."""
        ...

    def attend(self, layer: int, qkv: jax.Array, angles: RotaryAngles, *, scale: float,
               sliding_window: int | None) -> tuple[jax.Array, Self]:
        """Causal attention over each row's past and its new tokens.

        Args:
          layer: whose keys and values.
          qkv: [T, K, G + 2, H]; of each KV head its G query heads, its key, its value, not yet rotated.
          angles: of the tokens.
          scale: of scores.
          sliding_window: keys that a query sees, itself included; None is all before it.

        Returns:
          ([T, N, H], the context with the new keys and values).
        """
        ...

    def token_prompt_lens(self, num_tokens: int) -> jax.Array:
        """The prompt length of each token's request: [T] int32. Padding tokens get some row's."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "page_table", "cu_q_lens", "kv_lens", "prompt_lens"],
    meta_fields=["max_q_len", "forced"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedContext:
    """A packed ragged batch whose keys and values live in pages."""

    cache: KVCache
    page_table: jax.Array   # [B, M] int32, the rows of this batch
    cu_q_lens: jax.Array    # [B + 1] int32; row b owns tokens [cu_q_lens[b], cu_q_lens[b + 1])
    kv_lens: jax.Array      # [B] int32, the new tokens included
    prompt_lens: jax.Array  # [B] int32
    max_q_len: int | None
    """Static bound on any row's tokens; 1 is decode, None is no bound."""
    forced: ForcedKernels

    def attend(self, layer: int, qkv: jax.Array, angles: RotaryAngles, *, scale: float,
               sliding_window: int | None) -> tuple[jax.Array, "PagedContext"]:
        """Rotates, writes keys and values into their pages, then attends over the pages. Padding tokens give zeros."""
        with jax.named_scope("rotary_kv_write"):
            q, k_pages, v_pages = rotary_kv_write(
                qkv, *angles.query, *angles.key, self.cache.k[layer], self.cache.v[layer], self.page_table, self.cu_q_lens, self.kv_lens,
                implementation=self.forced.rotary)
        with jax.named_scope("ragged_paged_attention"):
            out = ragged_paged_attention(
                q, k_pages, v_pages, self.page_table, self.cu_q_lens, self.kv_lens, scale=scale, max_q_len=self.max_q_len,
                sliding_window=sliding_window, implementation=self.forced.attention)
        cache = KVCache(k=_replaced(self.cache.k, layer, k_pages), v=_replaced(self.cache.v, layer, v_pages))
        return out, dataclasses.replace(self, cache=cache)

    def token_prompt_lens(self, num_tokens: int) -> jax.Array:
        rows = jnp.searchsorted(self.cu_q_lens[1:], jnp.arange(num_tokens, dtype=jnp.int32), side="right", method="compare_all")
        return jnp.take(self.prompt_lens, rows, mode="clip")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["lengths", "prompt_lens"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseContext:
    """A batch [B, T] flattened to [B * T], each row a whole sequence from position 0. Holds no cache, forces nothing and returns itself.

    Plain float32 jnp, independent of the paged path; the scores take B * N * T * T * 4 bytes a layer.
    """

    lengths: jax.Array      # [B] int32; tokens at and past a row's length are padding
    prompt_lens: jax.Array  # [B] int32

    @property
    def forced(self) -> ForcedKernels:
        return NOTHING_FORCED

    def attend(self, layer: int, qkv: jax.Array, angles: RotaryAngles, *, scale: float,
               sliding_window: int | None) -> tuple[jax.Array, "DenseContext"]:
        """softmax(scale * q k^T, over keys at or before the query and inside the window) v. Padding tokens give zeros."""
        del layer
        b, (num_kv_heads, members, h) = self.lengths.shape[0], qkv.shape[1:]
        t, n = qkv.shape[0] // b, num_kv_heads * (members - 2)
        q = rotate(qkv[:, :, :-2].reshape(b * t, n, h), *angles.query)
        k, v = rotate(qkv[:, :, -2], *angles.key), qkv[:, :, -1]
        q, k, v = (x.astype(jnp.float32).reshape(b, t, num_kv_heads, -1, h) for x in (q, k, v))
        at = jnp.arange(t)
        allowed = at[None, :] <= at[:, None]  # [T, S]
        if sliding_window is not None:
            allowed &= at[None, :] > at[:, None] - sliding_window
        with jax.named_scope("dense_attention"):
            scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k[:, :, :, 0], precision="highest")
            weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
            out = jnp.einsum("bkgts,bskh->btkgh", weights, v[:, :, :, 0], precision="highest")
            out = jnp.where((at < self.lengths[:, None])[:, :, None, None, None], out, 0.0)
        return out.reshape(b * t, n, h), self

    def token_prompt_lens(self, num_tokens: int) -> jax.Array:
        return jnp.repeat(self.prompt_lens, num_tokens // self.lengths.shape[0], total_repeat_length=num_tokens)


def _replaced(arrays: tuple[jax.Array, ...], index: int, new: jax.Array) -> tuple[jax.Array, ...]:
    return (*arrays[:index], new, *arrays[index + 1:])


class Attention(nnx.Module):
    """Grouped-query attention; q, k and v are one weight [D, K, G + 2, H]: each KV head's G query heads, its key, its value.

    With `stacked_qkv`, for K = N, the weight is [D, 3, N, H]: all queries, all keys, all values.
    """

    def __init__(self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None, qkv_bias: bool,
                 output_bias: bool, qk_norm_eps: float | None, stacked_qkv: bool, dtype: jnp.dtype, quant: FormatOf = not_quantised):
        group = num_heads // num_kv_heads
        shape: tuple[int, ...] = (3, num_heads, head_dim) if stacked_qkv else (num_kv_heads, group + 2, head_dim)
        axes = (None, None, "kv_heads", None) if stacked_qkv else (None, "kv_heads", None, None)
        self.qkv = Linear(dim, shape, axes=axes, bias=qkv_bias, dtype=dtype, quant=quant("qkv"))
        self.query_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.key_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.output = Linear(num_heads * head_dim, (dim,), axes=("heads", None), bias=output_bias, dtype=dtype,
                             quant=quant("output"))
        self.head_dim = head_dim
        self.sliding_window = sliding_window
        self.stacked_qkv = stacked_qkv

    @jax.named_scope("attention")
    def __call__[C: AttentionContext](self, layer: int, x: jax.Array, angles: RotaryAngles, context: C) -> tuple[jax.Array, C]:
        """x [T, D] -> ([T, D], or parts of it as Linear leaves them, and the context)."""
        qkv = self._project(x, implementation=context.forced.matmul)
        out, context = context.attend(layer, qkv, angles, scale=self.head_dim**-0.5, sliding_window=self.sliding_window)
        with jax.named_scope("output"):
            out = out.astype(x.dtype).reshape(x.shape[0], -1)
            return self.output(out, implementation=context.forced.matmul, leave_parts=True), context

    @jax.named_scope("qkv")
    def _project(self, x: jax.Array, *, implementation: str | None) -> jax.Array:
        """x [T, D] -> [T, K, G + 2, H]."""
        qkv = self.qkv(x, implementation=implementation)
        if self.stacked_qkv:
            qkv = jnp.swapaxes(qkv, 1, 2)
        if self.query_norm is None or self.key_norm is None:
            return qkv
        return jnp.concatenate([self.query_norm(qkv[:, :, :-2]), self.key_norm(qkv[:, :, -2:-1]), qkv[:, :, -1:]], axis=2)
