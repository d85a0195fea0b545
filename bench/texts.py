"""Calibration and held-out text from what is on every machine: this repository's own files and Python's standard library. Copies none in.

  python -m bench.texts --kind=english|code --split=calibration|heldout --output=FILE.txt|FILE.jsonl

english: the docstrings of the standard library's modules, classes and functions, and this repository's Markdown.
code: the sources of the standard library and of this repository.
A file belongs to one split by a hash of its name, so that no text is in both, on any machine and in any version.
"""

import ast
import hashlib
import inspect
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from jaxinfer import cli

ROOT = Path(__file__).parents[1]
KINDS, SPLITS = ("english", "code"), ("calibration", "heldout")
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings", "pydoc_data",
                     "__phello__"})
"""Folders of the standard library that hold tables, tests, or other people's packages."""
MIN_DOCSTRING = 80
"""Characters of the shortest docstring that counts as English."""


def split_of(name: str) -> str:
    """calibration or heldout, by the file's name alone; about one in four is held out."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % 4 == 0]


def files(kind: str, split: str) -> list[Path]:
    """The files of a split, in order of their relative paths."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts)}
    own = ("*.md",) if kind == "english" else ("jaxinfer/**/*.py", "pallas_kernels/**/*.py", "convert/**/*.py", "bench/**/*.py")
    found |= {path.relative_to(ROOT).as_posix(): path for pattern in own for path in ROOT.glob(pattern)}
    return [found[name] for name in sorted(found) if split_of(name) == split]


def texts(kind: str, split: str) -> Iterator[str]:
    """The texts of a split, one a file."""
    for path in files(kind, split):
        source = path.read_text(encoding="utf-8", errors="replace")
        text = source if kind == "code" or path.suffix == ".md" else "\n\n".join(docstrings(source))
        if text.strip():
            yield text


def docstrings(source: str) -> Iterator[str]:
    """The longer docstrings of a Python file, without indentation and without the lines of interactive examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith((">>>", "..."))).strip()
        if len(text) >= MIN_DOCSTRING:
            yield text


def write(kind: str, split: str, output: Path) -> int:
    """Writes a split, one JSON record a file of it, or joined where the output is no .jsonl. Returns its number of characters."""
    parts = list(texts(kind, split))
    is_jsonl = output.suffix == ".jsonl"
    content = "".join(json.dumps({"text": part}) + "\n" for part in parts) if is_jsonl else "\n\n".join(parts)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(content, encoding="utf-8")
    return sum(map(len, parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_enum("kind", None, KINDS, "What to write.", flag_values=values)
    flags.DEFINE_enum("split", None, SPLITS, "Which of two disjoint sets of files.", flag_values=values)
    flags.DEFINE_string("output", None, "File to write: .jsonl for one record a file, otherwise plain text.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    given = values.flag_values_dict()
    for name in ("kind", "split", "output"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
    output = cli.expanded("output", given["output"])
    print(f"{output}: {write(given['kind'], given['split'], output)} characters")


if __name__ == "__main__":
    sys.exit(main())
