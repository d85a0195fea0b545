"""The strict loader: a converted checkpoint, live parameters or random weights -> LoadedModel. Never converts and never guesses.

The only jitted function here makes random weights; whoever runs the model compiles it.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from jaxinfer.checkpoint import read_manifest, restore_params
from jaxinfer.config import DTYPES
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.layers.attention import DenseContext
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import ParamSpec, abstract_model, bind, read_model_config
from jaxinfer.quant import QuantFormat
from jaxinfer.sharding import make_mesh, outside_meshes, param_sharding

QUANTIZED_PARAMS = (".packed", ".scales", ".zeros", ".perm")
"""Last names of parameters whose dtype their format fixes, whatever the model's is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model's structure and its parameters on the device."""

    config: ModelConfig
    graphdef: nnx.GraphDef[Decoder]
    """Structure without arrays; hashable, so it can be a static argument of jit."""
    params: dict[str, jax.Array]
    """Parameters keyed by dotted path."""
    manifest: dict[str, Any]
    """The checkpoint's manifest; empty for live or random parameters."""
    path: Path | None
    """The checkpoint's folder, where there is one."""

    def logits(self, tokens: jax.Array, lengths: jax.Array | None = None, prompt_lens: jax.Array | None = None) -> jax.Array:
        """Next-token logits at every position (teacher forcing): `teacher_forced_logits` with this model's parameters.

        Pure, so it can be jitted; but `jax.jit(model.logits)` compiles the weights in as constants, which jax's compilation
        cache, on once there is an LLM, takes minutes to write. Jit `teacher_forced_logits` itself, with `graphdef` static and
        `params` an argument.
        """
        return teacher_forced_logits(self.graphdef, self.params, tokens, lengths, prompt_lens)


def teacher_forced_logits(graphdef: nnx.GraphDef[Decoder], params: Mapping[str, jax.Array], tokens: jax.Array,
                          lengths: jax.Array | None = None, prompt_lens: jax.Array | None = None) -> jax.Array:
    """Logits of a dense batch of whole sequences, without pages or kernels. Pure; `graphdef` is static under jit.

    Args:
      graphdef: the structure of a LoadedModel.
      params: its parameters.
      tokens: [B, T] int32, every row from position 0, padded on the right with any id in [0, V).
      lengths: [B] int32, tokens of each row; None is T for all. Logits at and past a row's length mean nothing.
      prompt_lens: [B] int32, for families whose rotary embedding depends on the prompt; None is `lengths`.

    Returns:
      float32 [B, T, V].
    """
    b, t = tokens.shape
    lengths = jnp.full((b,), t, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    prompt_lens = lengths if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)
    model = bind(graphdef, params)
    positions = jnp.tile(jnp.arange(t, dtype=jnp.int32), b)
    context = DenseContext(lengths=lengths, prompt_lens=prompt_lens)
    hidden, _ = model(jnp.asarray(tokens, jnp.int32).reshape(-1), positions, context)
    return model.logits(hidden).reshape(b, t, -1)


def first_non_finite(model: LoadedModel, token_ids: Sequence[int]) -> str | None:
    """Where a sequence first meets NaN or infinity: 'embedding', 'layer 7', 'final norm' or 'lm_head'; None where it meets none.

    For the message of an error: runs the dense path operation by operation, over at most the first 2048 tokens.
    """
    tokens = jnp.asarray(list(token_ids[:2048]), jnp.int32)
    length = jnp.asarray([tokens.shape[0]], jnp.int32)
    module, context = bind(model.graphdef, model.params), DenseContext(lengths=length, prompt_lens=length)
    for name, hidden, _ in module.stages(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32), context):
        if not jnp.isfinite(hidden).all():
            return name
    return None if jnp.isfinite(module.logits(hidden[-1:])).all() else "lm_head"


def load(path: str | Path, *, dtype: str = "auto", tensor_parallel_size: int = 1) -> LoadedModel:
    """Loads a converted checkpoint onto the default device, or split over the first devices of this process.

    Args:
      path: folder written by `python -m convert`.
      dtype: "auto" (as stored), "bfloat16", "float16" or "float32".
      tensor_parallel_size: devices that share every layer.

    Raises:
      ConfigError: an unknown dtype, more devices than there are, or a model that cannot be shared by so many.
      CheckpointError: the folder is absent or incomplete, or its tensors are not exactly those of its config.
      UnsupportedModelError: its config or its weight format is not implemented.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}.")
    manifest = read_manifest(path)
    config = _read_config(path)
    _check_quantization(path, config, manifest)
    if config.architecture != manifest["architecture"]:
        raise CheckpointError(f"{path}: manifest.json says {manifest['architecture']}, config.json says {config.architecture}: convert "
                              "the model again.")
    devices = _first_devices(tensor_parallel_size)
    graphdef, specs = abstract_model(config, manifest["dtype"] if dtype == "auto" else dtype)
    with outside_meshes():
        params = restore_params(path, _placed(config, specs, devices))
    return LoadedModel(config=config, graphdef=graphdef, params=params, manifest=manifest, path=path)


def from_params(config: ModelConfig, params: Mapping[str, jax.Array], *, manifest: Mapping[str, Any] | None = None,
                path: Path | None = None) -> LoadedModel:
    """A model around live parameters, which are neither copied nor moved.

    Args:
      config: the model.
      params: exactly the parameters of `abstract_params(config, dtype)`, all but those of quantised weights of one dtype.
      manifest: facts about their origin.
      path: where they came from.

    Raises:
      CheckpointError: a parameter is missing, unknown, or of the wrong shape, or dtypes are mixed.
    """
    dtypes = sorted({str(value.dtype) for name, value in params.items() if not name.endswith(QUANTIZED_PARAMS)})
    if len(dtypes) != 1:
        raise CheckpointError(f"the parameters have the dtypes {dtypes}: give all of them one dtype.")
    graphdef, specs = abstract_model(config, dtypes[0])
    for name, value in params.items():
        if name in specs and value.dtype != specs[name].dtype:
            raise CheckpointError(f"{name} is {value.dtype}, its quantised format needs {specs[name].dtype}: see jaxinfer/quant.py.")
    _check_shapes({name: tuple(value.shape) for name, value in params.items()}, specs)
    return LoadedModel(config=config, graphdef=graphdef, params=dict(params), manifest=dict(manifest or {}), path=path)


def tensor_parallel_shardings(config: ModelConfig, devices: Sequence[jax.Device]) -> dict[str, Sharding]:
    """Where each parameter lies in an engine over these devices; `jax.device_put(params, ...)` brings parameters there.

    Args:
      config: the model.
      devices: of this process, in the order of the parts.

    Returns:
      Dotted path -> sharding.

    Raises:
      ConfigError: no devices, one of them twice, or a model that cannot be shared by so many.
    """
    if not isinstance(devices, Sequence) or not devices or not all(isinstance(device, jax.Device) for device in devices) or (
            len(set(devices)) < len(devices)):
        raise ConfigError(f"devices = {devices!r:.200}: must be a list of different devices, such as jax.local_devices()[:2].")
    return _shardings(config, abstract_model(config, "bfloat16")[1], devices)


def random_model(config: ModelConfig, *, dtype: str, seed: int, tensor_parallel_size: int = 1) -> LoadedModel:
    """A model with random weights made on the default device, or split over the first ones, for benchmarks and tests.

    Matrices are uniform with variance 1 / fan-in, embeddings and biases of size 0.02, norms one: activations stay near one
    through any number of layers. Quantised weights are made packed, with random zero points and scales that give the same variance.
    The same config, dtype and seed give the same weights.

    Args:
      config: the model.
      dtype: "bfloat16", "float16" or "float32".
      seed: of all weights.
      tensor_parallel_size: devices that share every layer.
    """
    devices = _first_devices(tensor_parallel_size)
    graphdef, specs = abstract_model(config, dtype)
    with outside_meshes():
        key = jax.random.key(seed)
        params = {name: _random_param(config, name, key, placed) for name, placed in _placed(config, specs, devices).items()}
    return LoadedModel(config=config, graphdef=graphdef, params=params, manifest={}, path=None)


def _random_param(config: ModelConfig, name: str, key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A parameter's random values."""
    salt = np.uint32(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))
    module, _, kind = name.rpartition(".")
    if kind in ("packed", "zeros", "perm"):
        return _random_integers(key, salt, kind=kind, bits=_quantized(config, module).bits, like=like)
    if kind == "scales":
        scale = math.sqrt(1.0 / config.quantizable()[module]) / _spread(_quantized(config, module))
        return _uniform(key, salt, 0.0, scale, like=like)
    return _uniform(key, salt, _half_width(name, like.shape), float(name.endswith("norm.weight")), like=like)


@functools.partial(jax.jit, static_argnames=("like",))
def _uniform(key: jax.Array, salt: np.uint32, half_width: float, mean: float, *, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Uniform in mean +- half_width, of the key's stream that the salt names. Compiled once a distinct shape."""
    values = jax.random.uniform(jax.random.fold_in(key, salt), like.shape, like.dtype, minval=-1.0, maxval=1.0)
    values = values * jnp.asarray(half_width, like.dtype) + jnp.asarray(mean, like.dtype)
    return jax.lax.with_sharding_constraint(values, like.sharding)


@functools.partial(jax.jit, static_argnames=("kind", "bits", "like"))
def _random_integers(key: jax.Array, salt: np.uint32, *, kind: str, bits: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Packed integers, every bit random; zero points one below or at the middle; or a permutation."""
    key = jax.random.fold_in(key, salt)
    if kind == "packed":
        values = jax.lax.bitcast_convert_type(jax.random.bits(key, like.shape, jnp.uint16), jnp.int16)
    elif kind == "zeros":
        values = (2**(bits - 1) - jax.random.bernoulli(key, shape=like.shape)).astype(like.dtype)
    else:
        values = jax.random.permutation(key, like.shape[0]).astype(like.dtype)
    return jax.lax.with_sharding_constraint(values, like.sharding)


def _quantized(config: ModelConfig, module: str) -> QuantFormat:
    """The format of a module that holds packed integers."""
    found = None if config.quantization is None else config.quantization.format_of(module)
    assert found is not None, module
    return found


def _spread(quant_format: QuantFormat) -> float:
    """Root mean square of uniformly random integers minus their zero point."""
    return math.sqrt((4**quant_format.bits - 1) / 12 + 0.25)


def _half_width(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("norm.weight"):
        return 0.0
    if name.endswith(".bias") or name in ("embedding.weight", "lm_head.weight"):
        return 0.02 * math.sqrt(3.0)
    return math.sqrt(3.0 / shape[0])


def _placed(config: ModelConfig, specs: Mapping[str, ParamSpec], devices: Sequence[jax.Device]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes with the place where each parameter is to live."""
    shardings = _shardings(config, specs, devices)
    return {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=shardings[name]) for name, spec in specs.items()}


def _shardings(config: ModelConfig, specs: Mapping[str, ParamSpec], devices: Sequence[jax.Device]) -> dict[str, Sharding]:
    """Where each parameter is to live. Raises ConfigError where the devices cannot share the model."""
    config.part(len(devices))
    mesh = make_mesh(devices)
    return {name: param_sharding(name, spec.shape, spec.axes, mesh=mesh, device=devices[0]) for name, spec in specs.items()}


def _first_devices(count: int) -> Sequence[jax.Device]:
    """So many devices of this process, the default one first."""
    if type(count) is not int or count < 1:
        raise ConfigError(f"tensor_parallel_size = {count!r}: must be an integer >= 1.")
    default = jax.config.jax_default_device
    devices = sorted(jax.local_devices(), key=lambda device: device != default)  # stable: the others stay in order
    if count > len(devices):
        kinds = ", ".join(sorted({device.device_kind for device in devices}))
        raise ConfigError(f"tensor_parallel_size = {count}: this process has {len(devices)} device{'s' * (len(devices) > 1)} ({kinds}): use "
                          f"at most {len(devices)}.")
    return devices[:count]


def _check_quantization(path: Path, config: ModelConfig, manifest: Mapping[str, Any]) -> None:
    """Manifest and config agree on whether weights are quantised, and their integers are packed as this version reads them."""
    stored, quantization = manifest["quantization"], config.quantization
    if (stored is None) != (quantization is None):
        raise CheckpointError(f"{path}: manifest.json says quantization {stored!r:.100}, config.json says {quantization!r:.100}: convert the "
                              "model again.")
    if quantization is not None:
        layouts = quantization.layouts()
        if stored.get("layouts") != layouts:
            raise CheckpointError(f"{path} holds integers packed as {stored.get('layouts')!r}, this version reads {layouts!r}: convert the "
                                  "model again.")


def _read_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    try:
        hf_config = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): convert the model again.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): convert the model again.") from error
    if not isinstance(hf_config, dict):
        raise CheckpointError(f"{file} holds no JSON object: convert the model again.")
    return read_model_config(hf_config)


def _check_shapes(found: Mapping[str, tuple[int, ...]], specs: Mapping[str, ParamSpec]) -> None:
    """Exactly the model's parameters, each of its shape."""
    problems = [f"{name} is missing" for name in sorted(specs.keys() - found.keys())]
    problems += [f"{name} is not part of the model" for name in sorted(found.keys() - specs.keys())]
    problems += [f"{name} has the shape {list(found[name])} instead of {list(specs[name].shape)}"
                 for name in sorted(specs.keys() & found.keys()) if found[name] != specs[name].shape]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"the parameters do not fit the config: {'; '.join(problems[:5])}{more}. Give exactly those that "
                              "models/registry.py:abstract_params lists for it.")
