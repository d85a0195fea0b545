"""Rules about the tree itself: who may import whom, where jit and partition specs stand, and that the map names every room."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxinfer", "pallas_kernels", "convert", "bench")

# Room -> rooms of jaxinfer that it may import (itself always). A room is a folder or a module right under jaxinfer/;
# scheduling and sampling parameters are rooms of their own, since host code needs them without arrays.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "sampling.params": {"errors"},
    "request": {"sampling.params", "errors"},
    "state": set(),
    "quant": {"errors"},
    "sharding": {"errors", "config"},
    "checkpoint": {"errors"},
    "detokenizer": set(),
    "tiktoken_tokenizer": {"detokenizer", "errors"},
    "tokenizer": {"tiktoken_tokenizer", "detokenizer", "errors"},
    "jsonl": {"request", "sampling.params", "errors"},
    "chat": {"request", "sampling.params", "errors"},
    "cli": {"config", "sampling.params", "errors"},
    "demo": {"cli", "errors"},
    "sampling": {"state", "sampling.params", "errors"},
    "layers": {"quant", "state", "sharding", "errors"},
    "models": {"layers", "quant", "state", "sharding", "errors"},
    "scheduler": {"request", "config", "sampling.params", "errors"},
    "engine": {"models", "layers", "quant", "scheduler", "sampling", "sampling.params", "state", "sharding", "checkpoint", "tokenizer",
               "request", "config", "errors"},
    "source": {"errors"},
    "groups": {"engine", "request", "sampling.params", "errors"},
    "batch": {"groups", "engine", "request", "errors"},
    "llm": {"batch", "groups", "engine", "source", "tokenizer", "request", "sampling.params", "checkpoint", "config", "errors"},
    "streams": {"groups", "request", "errors"},
    "stepper": {"streams", "groups", "engine", "request", "errors"},
    "async_llm": {"stepper", "streams", "groups", "llm", "engine", "tokenizer", "request", "sampling.params", "config", "errors"},
    "generate": {"llm", "chat", "jsonl", "cli", "request", "sampling.params", "config", "errors"},
    "replay": {"engine", "models", "layers", "sampling", "sampling.params", "state", "source", "cli", "errors"},
    "textfile": {"errors"},
    "drift": {"engine", "models", "layers", "errors"},
    "diagnose": {"drift", "engine", "quant", "source", "checkpoint", "tokenizer", "textfile", "cli", "errors"},
    "explain": {"engine", "models", "quant", "source", "checkpoint", "tokenizer", "state", "cli", "config", "errors"},
}
CONVERT_MAY = {"models", "layers", "quant", "checkpoint", "tokenizer", "textfile", "cli", "errors"}
NO_JAX = ("errors", "config", "request", "sampling.params", "scheduler", "detokenizer", "tiktoken_tokenizer", "tokenizer", "jsonl", "chat",
          "textfile", "cli", "demo", "source", "generate")
KERNELS_MAY = {"jax", "jaxlib", "numpy", "ml_dtypes", "pallas_kernels"}
JIT_FILES = {"jaxinfer/engine/compiled.py", "jaxinfer/engine/executables.py", "jaxinfer/engine/load.py"}


def sources(*packages: str) -> list[Path]:
    return sorted(p for package in packages for p in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; `from a.b import c` counts as a.b and, if it is a module, as a.b.c."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name(path)}:{node.lineno}: import by full name"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [m for m in below if is_module(m)]
            yield from modules
            if len(modules) < len(below):
                yield node.module


def is_module(dotted: str) -> bool:
    base = ROOT / dotted.replace(".", "/")
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def room(dotted: str) -> str:
    """'jaxinfer.engine.step' -> 'engine'; 'jaxinfer' itself -> ''."""
    parts = dotted.split(".")[1:]
    return "sampling.params" if parts[:2] == ["sampling", "params"] else ".".join(parts[:1])


def room_of(path: Path) -> str:
    return room(".".join(path.relative_to(ROOT).with_suffix("").parts)).removesuffix("__init__").strip(".")


@pytest.mark.parametrize("path", sources("jaxinfer"), ids=name)
def test_imports_go_downwards(path: Path) -> None:
    here = room_of(path)
    if here == "":
        return  # jaxinfer/__init__.py offers what the rooms have
    assert here in ROOMS, f"{name(path)} is in no room of tests/test_project.py: add a row with what it may import"
    for dotted in imports(path):
        top = dotted.split(".")[0]
        if top == "jaxinfer" and dotted not in ("jaxinfer", "jaxinfer.__version__"):
            assert room(dotted) in ROOMS[here] | {here}, f"{name(path)} imports {dotted}: {here} may import {sorted(ROOMS[here])}"
        assert top != "convert" or here == "source", f"{name(path)} imports {dotted}: only jaxinfer/source.py converts"
        assert top not in ("bench", "tests", "torch", "jax_triton"), f"{name(path)} imports {dotted}"
        assert top != "transformers" or here in ("tokenizer", "tiktoken_tokenizer"), f"{name(path)} imports {dotted}: only tokenizers need it"
        assert top not in ("jax", "jaxlib", "flax") or here not in NO_JAX, f"{name(path)} imports {dotted}: {here} is host code without jax"
        assert top != "numpy" or here != "scheduler", f"{name(path)} imports {dotted}: the scheduler is plain Python"


def test_rooms_have_no_cycle() -> None:
    left = {r: set(may) - {r} for r, may in ROOMS.items()}
    while left:
        leaves = {r for r, may in left.items() if not may & set(left)}
        assert leaves, f"the rows of {sorted(left)} allow a cycle"
        left = {r: may for r, may in left.items() if r not in leaves}


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=name)
def test_kernels_stand_alone(path: Path) -> None:
    for dotted in imports(path):
        top = dotted.split(".")[0]
        allowed = top in KERNELS_MAY or top in sys.stdlib_module_names
        allowed |= top in ("jax_triton", "triton") and "triton" in path.name
        assert allowed, f"{name(path)} imports {dotted}: kernels need jax and numpy only"


@pytest.mark.parametrize("path", sources("convert"), ids=name)
def test_conversion_needs_models_and_checkpoints_only(path: Path) -> None:
    for dotted in imports(path):
        top = dotted.split(".")[0]
        assert top not in ("torch", "bench", "tests", "pallas_kernels"), f"{name(path)} imports {dotted}"
        if top == "jaxinfer":
            assert room(dotted) in CONVERT_MAY | {""}, f"{name(path)} imports {dotted}: convert may import {sorted(CONVERT_MAY)}"


@pytest.mark.parametrize("path", sources("jaxinfer"), ids=name)
def test_jit_and_partition_specs_stand_in_their_files(path: Path) -> None:
    for node in ast.walk(tree(path)):
        found = names_in(node)
        assert "PartitionSpec" not in found or name(path) == "jaxinfer/sharding.py", f"{name(path)}:{node.lineno}: PartitionSpec"
        assert not found & {"jit", "pjit"} or name(path) in JIT_FILES, f"{name(path)}:{node.lineno}: jit stands in {sorted(JIT_FILES)}"


def names_in(node: ast.AST) -> set[str]:
    """The names that a node uses or imports by itself: jax.jit gives jit."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Name):
        return {node.id}
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_no_broad_except(path: Path) -> None:
    """A handler for everything may only clean up and raise again."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {"everything"} if node.type is None else {n for part in ast.walk(node.type) for n in names_in(part)}
            raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            broad = caught & {"everything", "Exception", "BaseException"}
            assert not broad or raises, f"{name(path)}:{node.lineno}: except {broad}: catch what can be handled"


def rooms_on_disk() -> list[str]:
    """Every package folder and every module right under jaxinfer/ or at the top."""
    found = [f"{package}/" for package in (*PACKAGES, "tests") if (ROOT / package).is_dir()]
    for path in sorted((ROOT / "jaxinfer").iterdir()):
        if (path / "__init__.py").is_file():
            found.append(f"jaxinfer/{path.name}/")
        elif path.suffix == ".py":
            found.append(f"jaxinfer/{path.name}")
    return found


def test_workspace_names_every_room() -> None:
    text = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")
    missing = [r for r in rooms_on_disk() if f"`{r}`" not in text]
    assert not missing, f"WORKSPACE.md does not name {missing}"


@pytest.mark.parametrize("document", ["WORKSPACE.md", "README.md"])
def test_documents_name_only_what_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:jaxinfer|pallas_kernels|convert|bench|tests)/[\w./-]*)`", text)
    missing = sorted({path for path in named if not (ROOT / path).exists()})
    assert not missing, f"{document} names {missing}"
    modules = set(re.findall(r"python -m ((?:jaxinfer|convert|bench)[\w.]*)", text))
    absent = sorted(m for m in modules if not (is_module(f"{m}.__main__") or (ROOT / f"{m.replace('.', '/')}.py").is_file()))
    assert not absent, f"{document} runs {absent}"


def test_importing_is_cheap_and_touches_no_device() -> None:
    code = ("import sys, time; start = time.perf_counter(); import jaxinfer; took = time.perf_counter() - start\n"
            "assert not {'jax', 'jaxlib', 'transformers', 'flax'} & set(sys.modules), 'a heavy package was imported'\nprint(took)")
    command = [sys.executable, "-c", code]
    took = min(float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout) for _ in range(2))
    assert took < 1.5


def test_python_versions_and_packages_agree() -> None:
    """The Makefile's jax is one that setup.cfg allows, and what setup.cfg packages is there."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    pinned = re.search(r"^JAX \?= jax==(\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned and f"jax>={pinned[1]},<" in setup
    for entry in re.findall(r"^\s+jaxinfer-\w+ = ([\w.]+):(\w+)$", setup, re.MULTILINE):
        assert is_module(entry[0]) and entry[1] in {n.name for n in tree(ROOT / f"{entry[0].replace('.', '/')}.py").body
                                                    if isinstance(n, ast.FunctionDef)}, f"setup.cfg names {entry}, which is not there"
