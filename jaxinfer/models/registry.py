"""Which architectures are implemented, and a model's parameters as flat shapes. Adding a family is one row of MODELS."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models import llama, mistral, qwen1, qwen2, qwen3
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.quant import read_quant_config

MODELS: dict[str, tuple[Callable[[Mapping[str, Any]], ModelConfig], type[Decoder]]] = {
    llama.ARCHITECTURE: (llama.read_config, llama.Llama),
    mistral.ARCHITECTURE: (mistral.read_config, mistral.Mistral),
    qwen1.ARCHITECTURE: (qwen1.read_config, qwen1.Qwen1),
    qwen2.ARCHITECTURE: (qwen2.read_config, qwen2.Qwen2),
    qwen3.ARCHITECTURE: (qwen3.read_config, qwen3.Qwen3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """A parameter's shape, dtype and logical axes."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    """One logical axis name, or None, a dimension; see jaxinfer/sharding.py."""


def read_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a Hugging Face config describes.

    Args:
      hf_config: the contents of config.json. Its quantization_config must be that of a converted checkpoint: what other libraries
        quantised is read by convert/formats.

    Raises:
      UnsupportedModelError: an unknown architecture, or an attribute that is missing or not implemented.
      ConfigError: groups of quantised weights that do not divide a module's inputs.
    """
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in list(MODELS):
        raise UnsupportedModelError(f"architectures = {architectures!r} in config.json: exactly one of {', '.join(sorted(MODELS))} "
                                    "is implemented.")
    quantization = hf_config.get("quantization_config")
    config = MODELS[architectures[0]][0]({name: value for name, value in hf_config.items() if name != "quantization_config"})
    return config if quantization is None else dataclasses.replace(config, quantization=read_quant_config(quantization))


def abstract_model(config: ModelConfig, dtype: Any) -> tuple[nnx.GraphDef[Decoder], dict[str, ParamSpec]]:
    """The model's structure and its parameters keyed by dotted path; allocates nothing."""
    model_class = MODELS[config.architecture][1]
    model = nnx.eval_shape(lambda: model_class(config, dtype=jnp.dtype(dtype)))
    graphdef, state = nnx.split(model)
    specs = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        specs[".".join(map(str, path))] = ParamSpec(shape=value.shape, dtype=value.dtype, axes=variable.get_metadata("axes"))
    return graphdef, specs


def abstract_params(config: ModelConfig, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, keyed by dotted path; what a checkpoint of this model must hold."""
    return {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in abstract_model(config, dtype)[1].items()}


def bind(graphdef: nnx.GraphDef[Decoder], params: Mapping[str, jax.Array]) -> Decoder:
    """The model with these parameters. Cheap enough only for tracing: call it inside jit.

    Args:
      graphdef: from `abstract_model`.
      params: keyed by dotted path.
    """
    tree: dict[str | int, Any] = {}
    for name, value in params.items():
        *parents, leaf = (int(part) if part.isdecimal() else part for part in name.split("."))
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return nnx.merge(graphdef, tree)
