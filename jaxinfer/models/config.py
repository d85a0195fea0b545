"""Closed-world reading of Hugging Face configs into ModelConfig.

Every attribute of a config is read, ignored by name, or equal to a default that changes nothing; anything else is refused
with its name and value. Nothing is inferred from file names, and nothing here reads a file.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.errors import ConfigError, UnsupportedModelError
from jaxinfer.layers.rotary import ROPE_KINDS, RopeConfig
from jaxinfer.quant import EMBEDDING, HEAD, QuantConfig, check_groups

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
    logn_len: int | None
    """Queries past this many tokens are scaled by log(position) / log(this); None is never. See layers/rotary.py."""
    qk_norm: bool
    """Whether every query and key head goes through an RMSNorm of its own weights before it is rotated."""
    stacked_qkv: bool
    """The qkv weight is [D, 3, N, H], all queries, then all keys, then all values, instead of [D, K, G + 2, H]; needs K = N."""
    qkv_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    tie_embeddings: bool
    """The vocabulary head is the embedding."""
    max_position_embeddings: int
    """Tokens that the model was made for."""
    sliding_windows: tuple[int | None, ...]
    """For each layer the keys that a query sees, itself included; None is all before it."""
    quantization: QuantConfig | None = None
    """Which modules hold packed integers, and how; None is none of them. A family's config does not say: see read_model_config."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "max_position_embeddings"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, value, "an integer >= 1")
        _require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, for the rotary embedding")
        _require(self.logn_len is None or self.logn_len > 1, "logn_len", self.logn_len, "an integer > 1 or None")
        assert not self.stacked_qkv or self.num_kv_heads == self.num_heads, "stacked_qkv has as many keys as queries"
        _require(_is_positive(self.norm_eps), "norm_eps", self.norm_eps, "a finite number > 0")
        _require(all(w is None or w >= 1 for w in self.sliding_windows), "sliding_windows", self.sliding_windows, "integers >= 1 or None")
        assert len(self.sliding_windows) == self.num_layers, (len(self.sliding_windows), self.num_layers)
        if self.quantization is not None:
            check_quantization(self.quantization, self.quantizable())

    def projections(self) -> dict[str, int]:
        """Every linear -> K, its inputs. The vocabulary head, the last, is one where it is not the embedding."""
        inputs = {"attention.qkv": self.dim, "attention.output": self.num_heads * self.head_dim, "mlp.gate_up": self.dim,
                  "mlp.down": self.mlp_dim}
        head = {} if self.tie_embeddings else {HEAD: self.dim}
        return {f"layers.{i}.{name}": k for i in range(self.num_layers) for name, k in inputs.items()} | head

    def quantizable(self) -> dict[str, int]:
        """Every module that can be quantised -> K: the linears and the embedding, whose groups lie along D."""
        return {**self.projections(), EMBEDDING: self.dim}

    def untied(self) -> "ModelConfig":
        """The same model with a vocabulary head of its own, which can be quantised apart from the embedding."""
        return dataclasses.replace(self, tie_embeddings=False)

    def part(self, tensor_parallel_size: int) -> "ModelConfig":
        """What one of so many devices computes of each layer; see jaxinfer/sharding.py.

        Raises:
          ConfigError: heads, hidden units or vocabulary do not divide, or the weights are quantised.
        """
        n = tensor_parallel_size
        if type(n) is not int or n < 1:
            raise ConfigError(f"tensor_parallel_size = {n!r}: must be an integer >= 1.")
        if n == 1:
            return self
        if self.quantization is not None:
            raise ConfigError(f"tensor_parallel_size = {n}: quantised weights run on one device only: use 1, or the unquantised model.")
        split = {"num_kv_heads": self.num_kv_heads, "num_heads": self.num_heads, "mlp_dim": self.mlp_dim, "vocab_size": self.vocab_size}
        most = math.gcd(*split.values())
        for name, length in split.items():
            if length % n:
                fitting = [i for i in range(1, most + 1) if most % i == 0]
                raise ConfigError(f"tensor_parallel_size = {n}: {name} = {length} of the model does not divide by it: use one of "
                                  f"{', '.join(map(str, fitting))}.")
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // n, num_heads=self.num_heads // n, mlp_dim=self.mlp_dim // n,
                                   vocab_size=self.vocab_size // n)


def check_quantization(quantization: QuantConfig, modules: Mapping[str, int], *, tensor_parallel_size: int = 1) -> None:
    """Refuses groups that a projection's inputs cannot be split into, and exceptions for modules that the model has not.

    Args:
      quantization: the config.
      modules: module -> K, its inputs; of `ModelConfig.quantizable`.
      tensor_parallel_size: devices that share the inputs of the two projections that are split by them, output and down.

    Raises:
      UnsupportedModelError: an exception for no module of the model, such as a head that is the embedding.
      ConfigError: groups that do not divide the inputs of a module, or of its share.
    """
    unknown = [module for module, _ in quantization.exceptions if module not in modules]
    if unknown:
        tied = " (its embeddings are tied: the head is the embedding)" if HEAD in unknown else ""
        raise UnsupportedModelError(f"the quantisation names {', '.join(unknown[:5])}, which the model has not or cannot hold quantised{tied}: "
                                    "convert the model again.")
    for module, num_inputs in modules.items():
        if (found := quantization.format_of(module)) is not None:
            split = tensor_parallel_size if module.endswith((".output", ".down")) else 1
            check_groups(module, num_inputs, found.group_size, tensor_parallel_size=split)


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

    def __init__(self, hf_config: Mapping[str, Any], *, architecture: str, model_type: str,
                 aliases: Mapping[str, str] = MappingProxyType({}), ignored: frozenset[str] = frozenset()):
        """Starts reading a config.

        Args:
          hf_config: the contents of config.json.
          architecture: named in messages.
          model_type: the only one accepted.
          aliases: older spellings of attributes -> the spelling that the family asks for.
          ignored: attributes that change nothing in this family, beside those that never do.
        """
        self.architecture = architecture
        self._attributes = dict(hf_config)
        for old, new in aliases.items():
            value = self._attributes.pop(old, None)
            if value is not None and self._attributes.setdefault(new, value) != value:
                raise UnsupportedModelError(f"the {architecture} config gives {old} = {value!r} and {new} = {self._attributes[new]!r}, "
                                            "which are two spellings of one thing: remove the wrong one.")
        self._left = set(self._attributes) - IGNORED - ignored
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

    def rope(self, *, default_theta: float | None, max_position_embeddings: int) -> RopeConfig:
        """The rotary embedding, in any of its spellings: rope_theta with rope_scaling, or rope_parameters.

        Args:
          default_theta: the family's base where the config gives none; None makes it required.
          max_position_embeddings: the config's, which some kinds take for the length that was trained.
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
        known = [name for name, row in ROPE_KINDS.items() if row.in_configs]
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(f"rope kind {kind!r} of the {self.architecture} config is not implemented; known kinds: "
                                        f"{', '.join(known)}. Running it unscaled would give wrong text.")
        if _among(settings.get("partial_rotary_factor"), (1.0,)):
            del settings["partial_rotary_factor"]
        parameters = self._rope_parameters(kind, settings, max_position_embeddings)
        return RopeConfig(kind=kind, theta=float(theta), parameters=tuple(sorted(parameters.items())))

    def _rope_parameters(self, kind: str, settings: dict[str, Any], max_position_embeddings: int) -> dict[str, float]:
        """A kind's settings, those that the config leaves out filled in."""
        row = ROPE_KINDS[kind]
        given = {name: value for name, value in settings.items() if value is not None}
        for name in given:
            if name not in row.required and name not in row.optional:
                raise UnsupportedModelError(f"rope setting {name!r} = {given[name]!r} of the {self.architecture} config is not implemented "
                                            f"for kind {kind!r}; known: {', '.join([*row.required, *row.optional]) or 'none'}.")
        if row.reads_max_len:
            given.setdefault("original_max_position_embeddings", max_position_embeddings)
        values = {**{name: value for name, value in row.optional.items() if value is not None}, **given}
        for name in {*row.required, *values}:
            if name == "truncate" and isinstance(values[name], bool):
                continue
            if not _is_positive(values.get(name)):
                raise UnsupportedModelError(f"rope kind {kind!r} of the {self.architecture} config needs a finite number > 0 as {name!r}, "
                                            f"found {values.get(name)!r}.")
        return {name: float(value) for name, value in values.items()}

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


def read_max_len(reader: ConfigReader, *, default_theta: float | None) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the tokens that the model was made for, stretched where it stretches them.

    Args:
      reader: of the config.
      default_theta: as `ConfigReader.rope` has it.
    """
    stated = reader.required("max_position_embeddings", int)
    if not 1 <= stated < 2**31:
        raise reader.unsupported("max_position_embeddings", "an integer >= 1 that int32 holds is needed")
    rope = reader.rope(default_theta=default_theta, max_position_embeddings=stated)
    max_len = ROPE_KINDS[rope.kind].max_len(rope, stated)
    if not 1 <= max_len < 2**31:
        raise reader.unsupported("max_position_embeddings", f"its rotary embedding makes it {max_len}, which int32 must hold")
    return rope, max_len


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
