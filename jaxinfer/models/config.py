"""Closed-world reading of Hugging Face configs into ModelConfig.

Every attribute of a config is read, ignored by name, or equal to a default that changes nothing; anything else is refused
with its name and value. Nothing is inferred from file names, and nothing here reads a file.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import UnsupportedModelError
from jaxinfer.layers.rotary import ROPE_KINDS, RopeConfig

__all__ = ["ConfigReader", "ModelConfig", "RopeConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that decides a decoder's shapes and arithmetic, whatever its family spelled it."""

    architecture: str
    """The Hugging Face architecture, a key of MODELS."""
    vocab_size: int
    """V: rows of the embedding, padded rows included."""
    num_layers: int
    """L."""
    dim: int
    """D."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """K; divides N."""
    head_dim: int
    """H; even."""
    mlp_dim: int
    """F."""
    norm_eps: float
    """Added to the mean square in every RMSNorm."""
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    tie_embeddings: bool
    """The vocabulary head is the embedding."""
    max_position_embeddings: int
    """Tokens that the model was made for."""
    sliding_windows: tuple[int | None, ...]
    """For each layer the keys that a query sees, itself included; None is all before it."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "max_position_embeddings"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, value, "an integer >= 1")
        _require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, for the rotary embedding")
        _require(_is_positive(self.norm_eps), "norm_eps", self.norm_eps, "a finite number > 0")
        _require(all(w is None or w >= 1 for w in self.sliding_windows), "sliding_windows", self.sliding_windows, "integers >= 1 or None")
        assert len(self.sliding_windows) == self.num_layers, (len(self.sliding_windows), self.num_layers)


IGNORED = frozenset({
    # What the file is, and how it was written or would be run elsewhere.
    "architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "transformers.js_config", "torch_dtype", "dtype",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache", "gradient_checkpointing",
    "is_llama_config", "tokenizer_class", "use_flash_attn", "unsloth_fixed", "unsloth_version",
    # Training.
    "initializer_range", "attention_dropout", "pretraining_tp", "keys_to_ignore_at_inference",
    # Tokens: read from the generation config and the tokenizer as well, in jaxinfer/tokenizer.py.
    "bos_token_id", "eos_token_id", "pad_token_id",
    # Outputs and heads of the transformers library that a causal language model does not use.
    "output_attentions", "output_hidden_states", "return_dict", "torchscript",
    "id2label", "label2id", "problem_type", "task_specific_params",
    "finetuning_task", "sep_token_id", "decoder_start_token_id", "prefix",
})
"""Attributes that change no number that the model computes."""

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (True, False), "is_encoder_decoder": (False,), "add_cross_attention": (False,), "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,), "pruned_heads": ({}, None), "chunk_size_feed_forward": (0,), "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,), "quantization_config": (None,), "use_bfloat16": (True, False), "tf_legacy_loss": (False,),
}
"""Attributes that are accepted with these values only."""


MAX_LAYERS = 1024


class ConfigReader:
    """Hands out a config's attributes and, at the end, refuses those that nobody asked for."""

    def __init__(self, hf_config: Mapping[str, Any], *, architecture: str, model_type: str):
        self.architecture = architecture
        self._attributes = dict(hf_config)
        self._left = set(hf_config) - IGNORED
        self.fixed("model_type", model_type)

    def required(self, name: str, kind: type) -> Any:
        """The attribute, which must be there and of the kind (an integer also serves as a float)."""
        if self._attributes.get(name) is None:
            raise UnsupportedModelError(f"the {self.architecture} config has no {name!r}: it decides the model's arithmetic and has no "
                                        "safe default; add it to config.json.")
        return self.optional(name, kind, None)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """The attribute, or `default` where it is absent or null."""
        self._left.discard(name)
        value = self._attributes.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.unsupported(name, f"a value of type {kind.__name__} is needed")
        return value

    def fixed(self, name: str, *accepted: Any) -> None:
        """The attribute may be absent, or one of the accepted values."""
        self._left.discard(name)
        if name in self._attributes and not _among(self._attributes[name], accepted):
            raise self.unsupported(name, f"only {' or '.join(map(repr, accepted))} is implemented")

    def rope(self, *, default_theta: float | None) -> RopeConfig:
        """The rotary embedding, in any of its spellings: rope_theta with rope_scaling, or rope_parameters.

        Args:
          default_theta: the family's base where the config gives none; None makes it required.
        """
        settings: dict[str, Any] = {}
        for source in ("rope_scaling", "rope_parameters"):
            for name, value in self.optional(source, dict, {}).items():
                name = "rope_type" if name == "type" else name
                if settings.setdefault(name, value) != value:
                    raise self.unsupported(source, f"it gives {name!r} = {value!r} where another spelling gave {settings[name]!r}")
        theta = self.optional("rope_theta", float, None)
        if theta is not None and settings.setdefault("rope_theta", theta) != theta:
            raise self.unsupported("rope_theta", f"rope_parameters give {settings['rope_theta']!r}")
        theta = settings.pop("rope_theta", default_theta)
        if theta is None:
            self.required("rope_theta", float)
        if not _is_positive(theta):
            raise UnsupportedModelError(f"rope_theta = {theta!r} in the {self.architecture} config: must be a finite number > 0.")
        kind = settings.pop("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            raise UnsupportedModelError(f"rope kind {kind!r} of the {self.architecture} config is not implemented; known kinds: "
                                        f"{', '.join(ROPE_KINDS)}. Running it unscaled would give wrong text.")
        self._check_rope_settings(kind, settings)
        return RopeConfig(kind=kind, theta=float(theta), parameters=tuple(sorted((k, float(v)) for k, v in settings.items())))

    def _check_rope_settings(self, kind: str, settings: dict[str, Any]) -> None:
        if _among(settings.get("partial_rotary_factor"), (1.0,)):
            del settings["partial_rotary_factor"]
        for name in ROPE_KINDS[kind].required:
            if not _is_positive(settings.get(name)):
                raise UnsupportedModelError(f"rope kind {kind!r} of the {self.architecture} config needs a finite number > 0 as {name!r}, "
                                            f"found {settings.get(name)!r}.")
        for name in settings:
            if name not in ROPE_KINDS[kind].required:
                raise UnsupportedModelError(f"rope setting {name!r} = {settings[name]!r} of the {self.architecture} config is not "
                                            f"implemented for kind {kind!r}; known: {', '.join(ROPE_KINDS[kind].required) or 'none'}.")

    def finish(self) -> None:
        """Refuses whatever was not read.

        Raises:
          UnsupportedModelError: with every such attribute and its value.
        """
        for name in sorted(self._left & set(HARMLESS)):
            self.fixed(name, *HARMLESS[name])
        if self._left:
            found = ", ".join(f"{name} = {self._attributes[name]!r}" for name in sorted(self._left))
            raise UnsupportedModelError(f"the {self.architecture} config has attributes that are not implemented: {found}. If they do not "
                                        "change what the model computes, remove them from config.json.")

    def unsupported(self, name: str, reason: str) -> UnsupportedModelError:
        """The error for an attribute whose value cannot be used."""
        return UnsupportedModelError(f"{name} = {self._attributes.get(name)!r} in the {self.architecture} config: {reason}.")


def read_num_layers(reader: ConfigReader) -> int:
    """L, within what any model has: a damaged count must not become a list of that length."""
    num_layers = reader.required("num_hidden_layers", int)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise reader.unsupported("num_hidden_layers", f"1 to {MAX_LAYERS} layers are needed")
    return num_layers


def read_head_dim(reader: ConfigReader, *, dim: int, num_heads: int) -> int:
    """H: explicit, or D / N, which must then be whole."""
    head_dim = reader.optional("head_dim", int, None)
    if head_dim is None and (num_heads < 1 or dim % num_heads):
        raise UnsupportedModelError(f"the {reader.architecture} config has no head_dim, and hidden_size {dim} is not a multiple of "
                                    f"{num_heads} heads: add head_dim to config.json.")
    return head_dim or dim // num_heads


def _among(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Membership in which True is not 1."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise UnsupportedModelError(f"{name} = {value!r} in the model config: must be {limit}.")
