"""Where arrays live and how devices share a layer: logical axis -> mesh axis. The only file that names PartitionSpec.

A step over several devices is one program that each of them runs on its share (tensor parallelism; Megatron-LM, arXiv 1909.08053): its
heads, its columns of gate and up, its rows of the vocabulary. Inside it, a layer says no more of it than `summed`, `joined` and `part_start`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxinfer.errors import ConfigError

MODEL_AXIS = "jaxinfer_model"
"""The mesh axis over which tensor parallelism splits every layer. No user's axis is called so: a layer tells by it where it runs."""

_NO_MESH = Mesh(np.empty((), dtype=object), ())

LOGICAL_AXES: dict[str, str | None] = {
    "vocab": MODEL_AXIS,     # rows of the embedding and of the vocabulary head
    "kv_heads": MODEL_AXIS,  # qkv: a KV head goes with its query heads
    "heads": MODEL_AXIS,     # rows of attention's output projection, N * H
    "mlp": MODEL_AXIS,       # columns of gate and up, rows of down
}
"""Logical axes as the layers declare them; dimensions declared None are never split."""


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh over the devices, in their order."""
    return Mesh(np.array(devices, dtype=object), (MODEL_AXIS,))


def make_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """As mesh_of; None for a single device, which needs no mesh."""
    return None if len(devices) == 1 else mesh_of(devices)


def param_sharding(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], *, mesh: Mesh | None, device: jax.Device) -> Sharding:
    """Where one parameter lives.

    Args:
      name: the parameter's path, for the error.
      shape: its shape.
      axes: its logical axes, one a dimension.
      mesh: from `make_mesh`; None puts the whole parameter on `device`.

    Raises:
      ConfigError: a split dimension is no multiple of the mesh's size.
    """
    assert len(shape) == len(axes), (name, shape, axes)
    if mesh is None:
        return SingleDeviceSharding(device)
    mesh_axes = [None if axis is None else LOGICAL_AXES[axis] for axis in axes]
    for length, axis, mesh_axis in zip(shape, axes, mesh_axes, strict=True):
        if mesh_axis is not None and length % mesh.shape[mesh_axis]:
            raise ConfigError(f"{name}: its {axis} axis of {length} cannot be split over {mesh.shape[mesh_axis]} devices: use a "
                              f"tensor_parallel_size that divides {length}.")
    return NamedSharding(mesh, PartitionSpec(*mesh_axes))


def whole(mesh: Mesh | None, device: jax.Device) -> Sharding:
    """Where an array lives that every device holds whole."""
    return SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec())


def kv_pages_sharding(mesh: Mesh | None, device: jax.Device) -> Sharding:
    """Where a layer's pool [P, K, Z, H] lives: each device holds the pages of its KV heads."""
    return SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec(None, LOGICAL_AXES["kv_heads"]))


def on_each(function: Callable[..., Any], mesh: Mesh | None, *, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """The function run by every device on its share of the arguments, as one program.

    Args:
      function: of positional arguments; sees shares of what is split.
      mesh: None returns the function itself.
      inputs: the arguments' shardings, a tuple of trees of NamedSharding or of beginnings of such trees.
      outputs: the result's, likewise. What is whole in it must come out alike on every device.
    """
    if mesh is None:
        return function
    specs = jax.tree.map(lambda sharding: sharding.spec, (inputs, outputs))
    return jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


@contextlib.contextmanager
def outside_meshes() -> Iterator[None]:
    """A context, or a decorator, in which no mesh is set that a caller may have set for programs of its own (jax.set_mesh)."""
    with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(_NO_MESH):
        yield


def summed(x: jax.Array) -> jax.Array:
    """The sum over the devices that share the step; x itself where one has all of it."""
    return jax.lax.psum(x, MODEL_AXIS) if is_shared() else x


def joined(x: jax.Array) -> jax.Array:
    """The devices' shares one after the other along the last axis; x itself where one device has all of it."""
    return jax.lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True) if is_shared() else x


def part_start(length: int) -> jax.Array | int:
    """Where this device's part of a split axis begins, each part being `length` long."""
    return jax.lax.axis_index(MODEL_AXIS) * length if is_shared() else 0


def is_shared() -> bool:
    """Whether the code being traced is one device's part of a step over several."""
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().manual_axes
