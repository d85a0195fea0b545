"""What the engine knows of the machine: the attached device, or a named GPU that is not attached (for explain)."""

import dataclasses
import os
from typing import TYPE_CHECKING

from jaxinfer.errors import ConfigError

if TYPE_CHECKING:
    import jax

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device."""

    name: str
    platform: str
    """cpu or gpu."""
    memory_bytes: int
    """Memory that an engine may plan with: the allocator's limit on an attached GPU, the RAM on a CPU."""
    read_bytes_per_s: float | None
    """Memory bandwidth that decode is measured against; None where it is not known."""
    bandwidth_source: str
    compute_capability: tuple[int, int] | None
    shared_memory_bytes: int | None
    """Shared memory that one block may use; None on a CPU."""


GPUS: dict[str, Hardware] = {
    "a100-40gb": Hardware(name="NVIDIA A100-SXM4-40GB", platform="gpu", memory_bytes=40 * 10**9, read_bytes_per_s=1.555e12,
                          bandwidth_source="data sheet", compute_capability=(8, 0), shared_memory_bytes=163 * 1024),
    "a100-80gb": Hardware(name="NVIDIA A100-SXM4-80GB", platform="gpu", memory_bytes=80 * 10**9, read_bytes_per_s=2.039e12,
                          bandwidth_source="data sheet", compute_capability=(8, 0), shared_memory_bytes=163 * 1024),
    "h100": Hardware(name="NVIDIA H100 80GB HBM3", platform="gpu", memory_bytes=80 * 10**9, read_bytes_per_s=3.35e12,
                     bandwidth_source="data sheet", compute_capability=(9, 0), shared_memory_bytes=227 * 1024),
    "h200": Hardware(name="NVIDIA H200", platform="gpu", memory_bytes=141 * 10**9, read_bytes_per_s=4.19e12,
                     bandwidth_source="measured device-to-device copy", compute_capability=(9, 0), shared_memory_bytes=227 * 1024),
}


def named_gpu(name: str) -> Hardware:
    """A GPU from the table.

    Raises:
      ConfigError: the name is not in the table.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu = {name!r}: must be one of {', '.join(GPUS)}.")
    return GPUS[name]


def ram_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def attached(device: "jax.Device | None" = None) -> Hardware:
    """The device, or the first one that jax has. Initialises jax's backend."""
    import jax

    device = device or jax.local_devices()[0]
    if device.platform != "gpu":
        return Hardware(name=f"CPU, {os.cpu_count()} cores", platform="cpu", memory_bytes=ram_bytes(), read_bytes_per_s=None,
                        bandwidth_source="not known for CPUs", compute_capability=None, shared_memory_bytes=None)
    stats = device.memory_stats() or {}
    major, minor = (int(x) for x in str(device.compute_capability).split("."))
    known = next((gpu for gpu in GPUS.values() if gpu.name in device.device_kind or device.device_kind in gpu.name), None)
    return Hardware(
        name=device.device_kind, platform="gpu", memory_bytes=stats.get("bytes_limit", 0) or 16 * _GIB,
        read_bytes_per_s=known.read_bytes_per_s if known else None,
        bandwidth_source=known.bandwidth_source if known else "not known for this device",
        compute_capability=(major, minor),
        shared_memory_bytes=known.shared_memory_bytes if known else (163 if major == 8 else 227) * 1024)
