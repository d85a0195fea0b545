"""Where parameters live: logical axis -> mesh axis. The only file that names PartitionSpec."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxinfer.errors import ConfigError

MODEL_AXIS = "model"
"""The mesh axis over which tensor parallelism splits every layer."""

LOGICAL_AXES: dict[str, str | None] = {
    "vocab": MODEL_AXIS,     # rows of the embedding and of the vocabulary head
    "kv_heads": MODEL_AXIS,  # qkv: a KV head goes with its query heads
    "heads": MODEL_AXIS,     # rows of attention's output projection, N * H
    "mlp": MODEL_AXIS,       # columns of gate and up, rows of down
}
"""Logical axes as the layers declare them; dimensions declared None are never split."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """A mesh over the devices; None for a single one, which needs no mesh."""
    return None if len(devices) == 1 else jax.make_mesh((len(devices),), (MODEL_AXIS,), devices=devices)


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
