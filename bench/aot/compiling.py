"""Compiles cases for one absent GPU. Runs in a process of its own: Mosaic GPU keeps the first target for a process's life."""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).parent / "targets"


def shared_limit(target: str) -> int:
    """Shared memory that one block may take on the target, bytes."""
    found = re.search(r"shared_memory_per_block_optin:\s*(\d+)", (TARGETS / f"{target}.txtpb").read_text())
    assert found is not None, f"{target}.txtpb names no shared_memory_per_block_optin"
    return int(found[1])


def chip(target: str) -> str:
    """What a target's kernels depend on: all of its description but the memory's size and rate, which only XLA's fusions look at."""
    text = re.sub(r"#.*", "", (TARGETS / f"{target}.txtpb").read_text())
    return re.sub(r"(memory_bandwidth|device_memory_size|device_description_str):.*", "", text)


def prepare(dump: Path) -> None:
    """Sets what must be set before jax is imported: dumps, no device, and the wheel's ptxas first on PATH, which XLA takes."""
    nvidia = find_spec("nvidia")
    for root in nvidia.submodule_search_locations or () if nvidia else ():
        if (Path(root) / "cu13/bin/ptxas").is_file():
            os.environ["PATH"] = f"{root}/cu13/bin{os.pathsep}{os.environ['PATH']}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}/xla --xla_dump_emitter_re=none".strip()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "MOSAIC_GPU_DUMP_TO": f"{dump}/mosaic",
                   "JAX_ENABLE_COMPILATION_CACHE": "false"}


def stub_nvdisasm(folder: Path) -> None:
    """Mosaic calls nvdisasm when it dumps, and no wheel of jax's has one: a copy of its CUDA root with a stub in place of it."""
    import jax.experimental.mosaic.gpu  # noqa: F401  sets MOSAIC_GPU_CUDA_ROOT

    root = Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])
    if (root / "bin/nvdisasm").exists():
        return
    (folder / "bin").mkdir(parents=True)
    for part in root.iterdir():
        if part.name != "bin":
            (folder / part.name).symlink_to(part)
    for tool in (root / "bin").iterdir():
        (folder / "bin" / tool.name).symlink_to(tool)
    stub = folder / "bin/nvdisasm"
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(folder)


def compile_cases(target: str, names: list[str], *, dump: Path) -> dict[str, Any]:
    """Case -> figures, or {"error": ...}."""
    prepare(dump)
    import jax
    from jax.experimental import topologies

    stub_nvdisasm(dump / "cuda")
    from bench.aot import reading
    from bench.aot.cases import Case, all_cases
    from jaxinfer.engine.placement import Placement, device_nbytes
    from jaxinfer.sharding import mesh_of
    from pallas_kernels.dispatch import traced_once

    config = (TARGETS / f"{target}.txtpb").read_text()

    def compiled_case(case: Case) -> tuple[jax.stages.Compiled, int, float]:
        """The executable, the bytes donated to it on each device, and the seconds of Python, which threads cannot share."""
        traced_once.cache_clear()  # what an earlier case lowered would leave no dumps in this one
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology=f"1x1x{case.num_devices}", target_config=config)
        mesh = mesh_of(topology.devices)
        placement = Placement(tuple(topology.devices), mesh)
        function, inputs, outputs = case.function, (placement.whole,) * len(case.arguments), placement.whole
        if case.shares is not None:
            inputs, outputs = case.shares(placement)
            function = placement.on_each(function, inputs=inputs, outputs=outputs)
        arguments = jax.tree.map(lambda sharding, shapes: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes), inputs, case.arguments)
        # The mesh tells XLA's lowerings which GPU it is, the default device tells Mosaic, which would otherwise take an absent one for sm_90.
        with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
            jitted = jax.jit(function, donate_argnums=case.donated, out_shardings=outputs)
            start = time.thread_time()
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
            python_seconds = time.thread_time() - start
            compiled = lowered.compile()
        return compiled, sum(device_nbytes(x) for i in case.donated for x in jax.tree.leaves(arguments[i])), python_seconds

    figures: dict[str, Any] = {}
    for name in names:
        for part in ("xla", "mosaic"):
            shutil.rmtree(dump / part, ignore_errors=True)
            (dump / part).mkdir()
        start = time.perf_counter()
        case = all_cases()[name]()
        compiled, donated_bytes, python_seconds = compiled_case(case)
        figures[name] = {**reading.summary(compiled, mosaic=dump / "mosaic", xla=dump / "xla"), "is_step": case.is_step,
                         "expected_kernels": case.kernels, "donated_bytes": donated_bytes, "python_seconds": round(python_seconds, 2),
                         "seconds": round(time.perf_counter() - start, 1)}
        print(f"[{target}] {name}: {figures[name]['seconds']} s", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Child process: target, output file, case names."""
    target, output, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        figures = compile_cases(target, names, dump=Path(folder))
    Path(output).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
