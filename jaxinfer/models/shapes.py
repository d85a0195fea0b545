"""Named model shapes for benchmarks and memory plans. Published configs, written out; no weights and no files."""

import dataclasses

from jaxinfer.models import llama, qwen1, qwen2
from jaxinfer.models.config import ModelConfig, RopeConfig
from jaxinfer.quant import EMBEDDING, FORMATS, GROUP_SIZES, HEAD, QuantConfig, QuantFormat


def _qwen2(*, vocab_size: int, num_layers: int, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, mlp_dim: int,
           tie_embeddings: bool, max_position_embeddings: int) -> ModelConfig:
    return ModelConfig(
        architecture=qwen2.ARCHITECTURE, vocab_size=vocab_size, num_layers=num_layers, dim=dim, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, mlp_dim=mlp_dim, norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=1e6), logn_len=None, qk_norm=False, stacked_qkv=False, qkv_bias=True, output_bias=False,
        tie_embeddings=tie_embeddings, max_position_embeddings=max_position_embeddings, sliding_windows=(None,) * num_layers)


SHAPES: dict[str, ModelConfig] = {
    # Qwen2-7B and Qwen2.5-7B.
    "Q": _qwen2(vocab_size=152064, num_layers=28, dim=3584, num_heads=28, num_kv_heads=4, head_dim=128, mlp_dim=18944,
                tie_embeddings=False, max_position_embeddings=32768),
    # The size of Qwen-7B, every head with its own keys and values, in the Qwen2 architecture.
    "M": _qwen2(vocab_size=151936, num_layers=32, dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, mlp_dim=11008,
                tie_embeddings=False, max_position_embeddings=32768),
    # Qwen-7B itself: logn attention, dynamic NTK.
    "qwen1-7b": ModelConfig(
        architecture=qwen1.ARCHITECTURE, vocab_size=151936, num_layers=32, dim=4096, num_heads=32, num_kv_heads=32, head_dim=128,
        mlp_dim=11008, norm_eps=1e-6, rope=RopeConfig(kind="qwen_ntk", theta=1e4, parameters=(("seq_length", 8192.0),)), logn_len=8192,
        qk_norm=False, stacked_qkv=True, qkv_bias=True, output_bias=False, tie_embeddings=False, max_position_embeddings=32768,
        sliding_windows=(None,) * 32),
    # Qwen2.5-0.5B.
    "Q0.5": _qwen2(vocab_size=151936, num_layers=24, dim=896, num_heads=14, num_kv_heads=2, head_dim=64, mlp_dim=4864,
                   tie_embeddings=True, max_position_embeddings=32768),
    # SmolLM2-135M.
    "smollm2": ModelConfig(
        architecture=llama.ARCHITECTURE, vocab_size=49152, num_layers=30, dim=576, num_heads=9, num_kv_heads=3, head_dim=64,
        mlp_dim=1536, norm_eps=1e-5, rope=RopeConfig(kind="default", theta=1e5), logn_len=None, qk_norm=False,
        stacked_qkv=False, qkv_bias=False, output_bias=False, tie_embeddings=True, max_position_embeddings=8192, sliding_windows=(None,) * 30),
    # For tests: compiles in a second or two.
    "tiny": _qwen2(vocab_size=256, num_layers=2, dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128,
                   tie_embeddings=True, max_position_embeddings=512),
}
"""Name -> config."""


def quantized(config: ModelConfig, name: str, *, lm_head: str | None = None, embedding: str | None = None) -> ModelConfig:
    """The model with every projection in the format of this name, with zero points and the widest groups that divide all inputs.

    Args:
      config: of an unquantised model.
      name: a key of jaxinfer.quant.FORMATS.
      lm_head: that of the vocabulary head, which a model with tied embeddings then has beside its embedding; None leaves it as it is.
      embedding: that of the embedding, and so of a head that is tied to it; None leaves it as it is.
    """
    fitting = [size for size in GROUP_SIZES if all(k % size == 0 for k in config.projections().values())]
    weights = QuantFormat(bits=FORMATS[name].bits, group_size=max(fitting, default=None), zero_point=True, permuted=False,
                          scales_dtype="float16")
    named = {module: dataclasses.replace(weights, bits=FORMATS[format_name].bits)
             for module, format_name in ((EMBEDDING, embedding), (HEAD, lm_head)) if format_name is not None}
    quantization = QuantConfig(method="random", weights=weights, exceptions=tuple(named.items()))
    return dataclasses.replace(config if lm_head is None else config.untied(), quantization=quantization)
