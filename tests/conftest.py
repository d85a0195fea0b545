"""Settings that hold for all tests: the device, how XLA compiles for a CPU, and how hypothesis draws."""

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis

# Without a GPU, or without the wheels for it, jax must not look for one; with both, test processes share its memory.
if Path("/dev/nvidia0").exists() and any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Nearly all of the suite's time goes to compiling, for programs that run for milliseconds.
    # Four devices, for what runs over several: everything else stays on the first.
    os.environ["XLA_FLAGS"] = ("--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4 "
                               + os.environ.get("XLA_FLAGS", ""))  # of two the last one holds
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # The first process of a run makes the folder; the others, and what tests start, find it in their environment. jax counts what it
        # loads from there as compiled, so the tests that count compiles see the same numbers.
        folder = tempfile.mkdtemp(prefix="jaxinfer-tests-xla-")
        owner = os.getpid()
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))  # and no child by fork
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
