"""Where benchmark figures go: one JSON file a run, with device, versions, date and commit. Measures nothing."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.engine.metrics import EngineMetrics

RESULTS = Path(__file__).parent / "results"


def default_folder() -> Path:
    """bench/results in a checkout; the current folder where this is installed, since nobody looks into site-packages."""
    return RESULTS if (Path(__file__).parents[1] / "pyproject.toml").is_file() else Path(".")


def environment() -> dict[str, Any]:
    """Device, versions, date and commit of this run."""
    import jax
    import jaxlib

    device = jax.local_devices()[0]
    return {
        "device": device.device_kind if device.platform == "gpu" else f"{cpu_name()} ({device.platform})",
        "num_devices": jax.local_device_count(), "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "python": platform.python_version(), "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
    }


def cpu_name() -> str:
    """The processor's own name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """Short hash of the tree that ran, with '+' where it had uncommitted changes. A copy without .git takes it from JAXINFER_COMMIT."""
    if "JAXINFER_COMMIT" in os.environ:
        return os.environ["JAXINFER_COMMIT"]

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    return (head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")) if head else "unknown"


def write(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes <name>.json into `folder`, default_folder() where None is given, and returns its path. The file is the old one or the new.

    Raises:
      ConfigError: the folder cannot be made or written.
    """
    folder = folder or default_folder()
    path = folder / f"{name}.json"
    require_folder(folder)
    try:
        unfinished = folder / f".{name}.{os.getpid()}.json"
        unfinished.write_text(json.dumps({"environment": environment(), **figures}, indent=1) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): name another folder.") from error
    return path


def require_folder(folder: Path | None) -> None:
    """Makes the folder that `write` will write into, before anything is measured.

    Raises:
      ConfigError: it cannot be made.
    """
    folder = folder or default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror or error}): name another folder.") from error


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned text."""
    if not rows:
        return ""
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), *[[cell(v) for v in row.values()] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in lines)


def phases(metrics: "EngineMetrics", seconds: float) -> dict[str, float | None]:
    """Where a run's time went, from what the engine counted in it: steps with prompts among them, and steps that only decode.

    Args:
      metrics: reset when the run began.
      seconds: what the run took.
    """
    rest = seconds - metrics.decode_seconds
    others = metrics.num_steps - metrics.num_decode_steps
    return {"prompt_tokens_per_s_of_mixed_steps": metrics.num_prefill_tokens / rest if rest > 0 else None,
            "mixed_step_ms": 1e3 * rest / others if others else None, "num_mixed_steps": others,
            "decode_step_ms": 1e3 * metrics.decode_seconds / metrics.num_decode_steps if metrics.num_decode_steps else None}
