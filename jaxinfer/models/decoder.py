"""The pre-norm decoder that the families share. Only wiring: parameters live in the layers, arithmetic in their functions."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.attention import Attention, AttentionContext
from jaxinfer.layers.embedding import Embedding, QuantizedEmbedding
from jaxinfer.layers.mlp import SwiGLU
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rotary import RotaryAngles, rotary_angles
from jaxinfer.models.config import ModelConfig
from jaxinfer.quant import EMBEDDING, HEAD, format_of


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The last sum is left to the norm that follows, which adds while it reads."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(
            config.dim, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            sliding_window=config.sliding_windows[index], qkv_bias=config.qkv_bias, output_bias=config.output_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None, stacked_qkv=config.stacked_qkv, dtype=dtype,
            quant=format_of(config.quantization, f"layers.{index}.attention"))
        self.mlp_norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=dtype)
        self.mlp = SwiGLU(config.dim, config.mlp_dim, dtype=dtype, quant=format_of(config.quantization, f"layers.{index}.mlp"))
        self.index = index

    def __call__[C: AttentionContext](self, x: jax.Array, branch: jax.Array | None, angles: RotaryAngles,
                                      context: C) -> tuple[jax.Array, jax.Array, C]:
        """x [T, D], and what is to be added to it if anything is, maybe in parts [P, T, D] -> the same of this layer's output, and the
        context."""
        forced = context.forced
        normed, x = (self.attention_norm(x), x) if branch is None else self.attention_norm.of_sum(branch, x, implementation=forced.norm)
        attended, context = self.attention(self.index, normed, angles, context)
        normed, x = self.mlp_norm.of_sum(attended, x, implementation=forced.norm)
        return x, self.mlp(normed, implementation=forced.matmul), context


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, and the vocabulary head (the embedding itself where tied)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        self.config = config
        self.embedding = _table(config, EMBEDDING, dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype) for i in range(config.num_layers)])
        self.final_norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else _table(config, HEAD, dtype)

    def __call__[C: AttentionContext](self, token_ids: jax.Array, positions: jax.Array, context: C) -> tuple[jax.Array, C]:
        """Runs the layers over a flat batch of tokens.

        Args:
          token_ids: [T] int32 in [0, V).
          positions: [T] int32, each token's place in its own sequence.
          context: what the batch attends to (layers/attention.py).

        Returns:
          (hidden [T, D] after the final norm, the context with the new keys and values).
        """
        *_, (_, hidden, updated) = self.stages(token_ids, positions, context)
        return hidden, updated

    def stages[C: AttentionContext](self, token_ids: jax.Array, positions: jax.Array, context: C) -> Iterator[tuple[str, jax.Array, C]]:
        """(name, hidden [T, D], context) after the embedding, after each layer and after the final norm; arguments as for a call."""
        x = self.embedding(token_ids)
        yield "embedding", x, context
        angles = rotary_angles(self.config.rope, positions, context.token_prompt_lens(token_ids.shape[0]),
                               head_dim=self.config.head_dim, logn_len=self.config.logn_len)
        branch = None
        for layer in self.layers:
            with jax.named_scope(f"layer_{layer.index}"):
                x, branch, context = layer(x, branch, angles, context)
            yield f"layer {layer.index}", x + whole(branch, x.dtype), context
        yield "final norm", self.final_norm(x) if branch is None else self.final_norm.of_sum(
            branch, x, implementation=context.forced.norm)[0], context

    def logits(self, hidden: jax.Array, *, implementation: str | None = None) -> jax.Array:
        """[R, D] -> float32 [R, V], padded vocabulary rows included; a quantised head's product by the implementation of int4_matmul that
        is named, None for its choice."""
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden, implementation=implementation)


def whole(branch: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What a branch adds, [T, D], from that or from its parts."""
    return branch if branch.ndim == 2 else jnp.sum(branch, axis=0).astype(dtype)


def _table(config: ModelConfig, module: str, dtype: jnp.dtype) -> Embedding | QuantizedEmbedding:
    """The embedding or the vocabulary head, plain or quantised."""
    quant = None if config.quantization is None else config.quantization.format_of(module)
    if quant is None:
        return Embedding(config.vocab_size, config.dim, dtype=dtype)
    return QuantizedEmbedding(config.vocab_size, config.dim, dtype=dtype, quant=quant)
