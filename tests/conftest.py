"""Settings that hold for all tests: the device, and how hypothesis draws."""

import importlib.util
import os
from pathlib import Path

import hypothesis

# Without a GPU, or without the wheels for it, jax must not look for one; with both, test processes share its memory.
if Path("/dev/nvidia0").exists() and any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Four devices, for what runs over several: everything else stays on the first.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", "")  # of two the last one holds
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
