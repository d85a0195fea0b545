"""A second way from a source's tensors to logits: plain numpy in float32, written from the papers, to compare a conversion with.

Shares no arithmetic, no layout and no config reading with jaxinfer, and is made to be read, not to be fast. Works through the model layer
by layer and through each matrix in blocks of rows, so its memory does not grow with the model.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from convert.dequantized import DequantizedSource
from convert.source import Source
from jaxinfer.errors import UnsupportedModelError

BLOCK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """A family's tensors, as its own library calls them."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one that holds all queries, then all keys, then all values."""
    output: str = "self_attn.o_proj"
    gate_up_down: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    final_norm: str = "model.norm"


FAMILIES = {
    "LlamaForCausalLM": _Names(),
    "MistralForCausalLM": _Names(),
    "Qwen2ForCausalLM": _Names(),
    "Qwen3ForCausalLM": _Names(),
    "QWenLMHeadModel": _Names(
        embedding="transformer.wte", layer="transformer.h", norms=("ln_1", "ln_2"), qkv=("attn.c_attn",), output="attn.c_proj",
        gate_up_down=("mlp.w2", "mlp.w1", "mlp.c_proj"), final_norm="transformer.ln_f"),
}


class Float32Model:
    """The forward pass of one source.

    Args:
      source: the opened checkpoint.
      dtype: the conversion's dtype, to which every weight is rounded before it is used in float32; quantised ones are not.
      num_tokens: length of the rows that will be asked for.

    Raises:
      UnsupportedModelError: the architecture or its rope kind is not implemented here.
    """

    def __init__(self, source: Source, dtype: np.dtype[Any], *, num_tokens: int) -> None:
        config = source.config
        architecture = config["architectures"][0]
        if architecture not in FAMILIES:
            raise UnsupportedModelError(f"--verify is not implemented for {architecture}, only for {', '.join(FAMILIES)}: convert without it")
        self._source, self._dtype, self._names, self._config = source, dtype, FAMILIES[architecture], config
        self._exact = source.exact if isinstance(source, DequantizedSource) else frozenset()
        self._num_heads = int(self._get("num_attention_heads", "n_head"))
        self.dim = source.tensors[f"{self._names.embedding}.weight"].shape[1]
        self._head_dim = int(self._get("head_dim", "kv_channels", default=self.dim // self._num_heads))
        self._eps = np.float32(self._get("rms_norm_eps", "layer_norm_epsilon"))
        pattern = re.compile(re.escape(self._names.layer) + r"\.(\d+)\.")
        self._num_layers = 1 + max(int(match[1]) for name in source.tensors if (match := pattern.match(name)))
        self._cos, self._sin = self._rotary(num_tokens)

    def _get(self, *names: str, default: Any = None) -> Any:
        values = [self._config[name] for name in names if self._config.get(name) is not None]
        return values[0] if values else default

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Token ids [R, T] -> float32 [R, T, V], every row from position 0."""
        names = self._names
        x = np.concatenate([self._rows(f"{names.embedding}.weight", int(i), int(i) + 1) for i in tokens.ravel()])
        x = x.reshape(*tokens.shape, self.dim)
        for layer in range(self._num_layers):
            prefix = f"{names.layer}.{layer}."
            x = x + self._attention(prefix, layer, self._norm(prefix + names.norms[0], x))
            y = self._norm(prefix + names.norms[1], x)
            gate, up, down = (prefix + name for name in names.gate_up_down)
            g = self._linear(gate, y)
            x = x + self._linear(down, g / (1.0 + np.exp(-g)) * self._linear(up, y))
        head = "lm_head" if "lm_head.weight" in self._source.tensors else names.embedding
        return self._linear(head, self._norm(names.final_norm, x))

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor, rounded to the conversion's dtype, in float32."""
        rows = self._source.read_rows(name, start, stop)
        return (rows if name in self._exact else rows.astype(self._dtype)).astype(np.float32)

    def _vector(self, name: str) -> np.ndarray:
        return self._rows(name, 0, self._source.tensors[name].shape[0])

    def _linear(self, name: str, x: np.ndarray, first: int = 0, stop: int | None = None) -> np.ndarray:
        """x @ weight[first:stop].T + bias[first:stop], in blocks of the weight's rows."""
        num_out, num_in = self._source.tensors[f"{name}.weight"].shape
        stop = num_out if stop is None else stop
        step = max(1, BLOCK_BYTES // (4 * num_in))
        out = [x @ self._rows(f"{name}.weight", i, min(i + step, stop)).T for i in range(first, stop, step)]
        result = np.concatenate(out, axis=-1)
        return result + self._vector(f"{name}.bias")[first:stop] if f"{name}.bias" in self._source.tensors else result

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._eps) * self._vector(f"{name}.weight")

    def _attention(self, prefix: str, layer: int, x: np.ndarray) -> np.ndarray:
        """[R, T, D] -> [R, T, D]."""
        names, size = self._names, self._num_heads * self._head_dim
        if len(names.qkv) == 1:
            q, k, v = (self._linear(prefix + names.qkv[0], x, i * size, (i + 1) * size) for i in range(3))
        else:
            q, k, v = (self._linear(prefix + name, x) for name in names.qkv)
        q, k, v = (y.reshape(*x.shape[:2], -1, self._head_dim) for y in (q, k, v))
        if f"{prefix}self_attn.q_norm.weight" in self._source.tensors:
            q, k = self._norm(f"{prefix}self_attn.q_norm", q), self._norm(f"{prefix}self_attn.k_norm", k)
        q, k = self._rotate(q), self._rotate(k)
        groups = self._num_heads // k.shape[2]
        position = np.arange(x.shape[1])
        distance = position[:, None] - position[None, :]
        window = self._window(layer)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        out = np.empty_like(q)
        for head in range(self._num_heads):
            scores = q[:, :, head] @ k[:, :, head // groups].swapaxes(1, 2) / np.float32(math.sqrt(self._head_dim))
            scores = np.where(hidden, np.float32(-np.inf), scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, :, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, :, head // groups]
        return self._linear(prefix + names.output, out.reshape(*x.shape[:2], size))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = self._head_dim // 2
        a, b, cos, sin = x[..., :half], x[..., half:], self._cos[:, None], self._sin[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included; None is all before it."""
        window, types = self._config.get("sliding_window"), self._config.get("layer_types")
        if window is None or not self._config.get("use_sliding_window", self._config["model_type"] == "mistral"):
            return None
        if types is not None:
            return int(window) if types[layer] == "sliding_attention" else None
        return int(window) if layer >= self._config.get("max_window_layers", 0) else None

    def _rotary(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin), each [T, H // 2] float32."""
        config, size = self._config, self._head_dim
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = float(rope.get("rope_theta") or self._get("rope_theta", "rotary_emb_base", default=10000.0))
        kind = rope.get("rope_type") or rope.get("type") or "default"
        factor, trained = float(rope.get("factor") or 1.0), rope.get("original_max_position_embeddings")
        trained = float(trained or config["max_position_embeddings"])
        if num_tokens > config.get("seq_length", num_tokens):
            raise UnsupportedModelError(f"--verify compares {num_tokens} tokens, more than this model's seq_length {config['seq_length']}: "
                                        "convert without it")
        if kind == "dynamic" and num_tokens > trained:
            theta *= (factor * num_tokens / trained - (factor - 1.0)) ** (size / (size - 2))
        frequencies = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
        magnitude = 1.0
        if kind == "linear":
            frequencies = frequencies / factor
        elif kind == "llama3":
            frequencies = _llama3(frequencies, factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), trained)
        elif kind == "yarn":
            frequencies, magnitude = _yarn(frequencies, rope, theta, factor, trained)
        elif kind not in ("default", "dynamic"):
            raise UnsupportedModelError(f"--verify is not implemented for rope kind {kind!r}: convert without it")
        angles = np.arange(num_tokens)[:, None] * frequencies
        return (magnitude * np.cos(angles)).astype(np.float32), (magnitude * np.sin(angles)).astype(np.float32)


def _llama3(frequencies: np.ndarray, factor: float, low: float, high: float, trained: float) -> np.ndarray:
    """Llama 3.1's: wavelengths above trained / low are divided by factor, those below trained / high kept, a linear blend between."""
    result = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < trained / high:
            result.append(frequency)
        elif wavelength > trained / low:
            result.append(frequency / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(result)


def _yarn(frequencies: np.ndarray, rope: dict[str, Any], theta: float, factor: float, trained: float) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolation by dimension, and the factor on cosines and sines. -> (frequencies, factor)."""
    size = 2 * len(frequencies)
    ends = [size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))]
    if rope.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], size - 1)
    blend = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        pair = [rope.get("mscale"), rope.get("mscale_all_dim")]
        weights = [float(weight) for weight in pair if weight] if all(pair) else [1.0]
        scales = [0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0 for weight in weights]
        scale = scales[0] / scales[1] if len(scales) == 2 else scales[0]
    return frequencies * (1 - blend) + frequencies / factor * blend, float(scale)
