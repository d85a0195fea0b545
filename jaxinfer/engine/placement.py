"""On which devices an engine's weights and state lie: on one, or, layer by layer, shared by several. Moves nothing that lies there already."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxinfer.engine.load import LoadedModel, tensor_parallel_shardings
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import abstract_model
from jaxinfer.sharding import kv_pages_sharding, make_mesh, on_each, whole
from jaxinfer.state import DeviceState, KVCache


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of one engine, in the order in which they share each layer."""

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None
    """None for a single device."""

    @property
    def whole(self) -> Sharding:
        """Of what every device holds whole."""
        return whole(self.mesh, self.devices[0])

    @property
    def host_array(self) -> Sharding | None:
        """Of what comes from the host: named only where there are several devices to choose from."""
        return None if self.mesh is None else self.whole

    @property
    def size(self) -> int:
        return len(self.devices)

    def params(self, model: LoadedModel) -> dict[str, Sharding]:
        """Of each parameter.

        Raises:
          ConfigError: the model cannot be shared by so many devices.
        """
        return dict.fromkeys(model.params, self.whole) if self.mesh is None else tensor_parallel_shardings(model.config, self.devices)

    def graphdef(self, model: LoadedModel) -> nnx.GraphDef[Decoder]:
        """The structure of each device's part of the model."""
        if self.mesh is None:
            return model.graphdef
        return abstract_model(model.config.part(self.size), model.params["final_norm.weight"].dtype)[0]

    @property
    def state(self) -> DeviceState:
        """Of the device state: one sharding for all arrays of a field."""
        pages: Any = kv_pages_sharding(self.mesh, self.devices[0])
        rest: Any = self.whole
        return DeviceState(cache=KVCache(k=pages, v=pages), page_table=rest, slots=rest, hidden=rest)

    def on_each(self, function: Callable[..., Any], *, inputs: Any, outputs: Any) -> Callable[..., Any]:
        """The function run by every device on its share, as jaxinfer/sharding.py has it."""
        return on_each(function, self.mesh, inputs=inputs, outputs=outputs)


def device_nbytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each device that has a part of it."""
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def place(model: LoadedModel) -> tuple[LoadedModel, Placement]:
    """The model as an engine runs it, its weights being the very buffers given, and where they lie.

    Weights may lie on one device; or be split over several as `tensor_parallel_shardings` has it, under any mesh. Of devices that hold
    the same parts (a trainer's data-parallel replicas) the first of this process serve.

    Raises:
      ConfigError: they lie in another way.
      CheckpointError: one is no array on a device.
    """
    for name, x in model.params.items():
        if not isinstance(x, jax.Array) or x.is_deleted():
            what = "was deleted, as donated arrays are" if isinstance(x, jax.Array) else f"is a {type(x).__name__}"
            raise CheckpointError(f"{name} {what}: an engine runs on live jax arrays; bring it to its device with jax.device_put.")
    placement = _placement(model.params)
    params, problems = {}, []
    for name, sharding in placement.params(model).items():
        view = lying_as(model.params[name], sharding)
        if view is None:
            problems.append(f"{name} {list(model.params[name].shape)} has {model.params[name].sharding}")
        else:
            params[name] = view
    if problems:
        n = placement.size
        raise ConfigError(f"{len(problems)} of {len(model.params)} weights do not lie as an engine over {n} device{'s' * (n > 1)} needs them "
                          f"({'; '.join(problems[:2])}): bring them there by params = jax.device_put(params, "
                          "jaxinfer.tensor_parallel_shardings(config, devices)), where devices may be a single one.")
    return dataclasses.replace(model, params=params), placement


def lying_as(x: jax.Array, sharding: Sharding) -> jax.Array | None:
    """The array with this sharding, over the same buffers, where they lie so already; None where they do not, or in other memory."""
    if x.sharding == sharding:
        return x
    if _memory(x.sharding) != _memory(sharding):
        return None
    wanted = sharding.addressable_devices_indices_map(x.shape)
    parts = {shard.device: shard for shard in x.addressable_shards}
    for device, index in wanted.items():
        if device not in parts or index is None or _bounds(parts[device].index, x.shape) != _bounds(index, x.shape):
            return None
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [parts[device].data for device in wanted])


def _placement(params: Mapping[str, jax.Array]) -> Placement:
    """The devices whose parts make up every parameter, in the parts' order, as the parameter that is split most has them."""
    found: dict[Any, jax.Device] = {}
    for x in params.values():
        parts: dict[Any, jax.Device] = {}
        for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id):
            parts.setdefault(_bounds(shard.index, x.shape), shard.device)
        if len(parts) > len(found):
            found = parts
    devices = tuple(device for _, device in sorted(found.items()))
    return Placement(devices, make_mesh(devices))


def _memory(sharding: Sharding) -> str:
    """The kind of memory: the device's own, or the host's."""
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind or device.default_memory().kind


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each dimension."""
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))
