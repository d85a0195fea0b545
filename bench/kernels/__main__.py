"""Times the kernels beside their peers and the device's ceilings, each call on operands that are not in the cache.

  python -m bench.kernels [--ops=decode,prefill,...] [--shapes=b1,16,...] [--arch=80] [--processes=8] [--name=NAME]
  python -m bench.kernels --plot=bench/results/kernels-attention-nvidia-h200.json
Rows are device time (see timing.py). --arch=80 runs the path that an A100 takes on a newer GPU. --tiny shrinks every shape, to try the
program on a CPU. Most of a row's time goes to compiling its kernel: --processes=N compiles in N processes, of which one at a time has the
GPU. The result file is written after every row, so that a run that is ended keeps what it had. Exit status 1 where one of our own kernels
failed or a check does not hold.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags

from bench import report
from bench.kernels import plot
from bench.kernels.groups import GROUPS, of_shapes
from bench.kernels.rows import Settings
from bench.kernels.running import Results, lower_for, path_of, run_group
from bench.kernels.timing import measure_ceilings
from bench.kernels.turns import share_memory
from bench.kernels.workers import run_groups
from jaxinfer import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry."""
    values = flags.FlagValues()
    define = functools.partial(flags.DEFINE_string, flag_values=values, module_name="What")
    flags.DEFINE_list("ops", list(GROUPS), f"What to time, of {', '.join(GROUPS)}.", flag_values=values, module_name="What")
    flags.DEFINE_list("shapes", [], "Only rows whose shape's name begins with one of these.", flag_values=values, module_name="What")
    flags.DEFINE_enum("arch", None, ["80"], "Lower the Mosaic kernels as for this architecture.", flag_values=values, module_name="What")
    flags.DEFINE_bool("tiny", False, "Small shapes, for a try on a CPU.", flag_values=values, module_name="What")
    flags.DEFINE_enum("page_size", "64", ["16", "32", "64", "96", "128"], "Tokens a page.", flag_values=values, module_name="What")
    flags.DEFINE_integer("processes", 1, "That share the rows; each takes up to some GB of the GPU's memory.", lower_bound=1,
                         flag_values=values, module_name="What")
    define("name", None, "Name of the result file; default: kernels-<device>.")
    define("folder", None, "Where the result file goes; default: bench/results.")
    define("plot", None, "Draw this result file as a PNG beside it, and do nothing else.")
    return cli.run(lambda _: _main(values), values, argv, __doc__)


def _main(values: flags.FlagValues) -> int:
    """The command, its flags parsed."""
    ops, name = list(values["ops"].value or ()), values["name"].value
    if values["plot"].value:
        return draw(Path(values["plot"].value))
    unknown = sorted(set(ops) - set(GROUPS))
    if unknown or not ops:
        raise app.UsageError(f"--ops={','.join(unknown)}: must be some of {', '.join(GROUPS)}.")
    settings = Settings(tiny=bool(values["tiny"].value), page_size=int(str(values["page_size"].value)), arch=values["arch"].value,
                        shapes=tuple(values["shapes"].value or ()))
    if "" in settings.shapes or (values["shapes"].present and not settings.shapes):
        raise app.UsageError(f"--shapes={','.join(settings.shapes)}: an empty name, with which every shape begins; leave --shapes out for all.")
    processes = int(str(values["processes"].value))
    if processes > 1:
        share_memory()  # before anything that asks jax for its devices
    known = {item.shape for op in ops for item in GROUPS[op](settings)} if settings.shapes else set()
    unknown = sorted(text for text in settings.shapes if not any(shape.startswith(text) for shape in known))
    if unknown:
        raise app.UsageError(f"--shapes={','.join(unknown)}: no shape of --ops={','.join(ops)} begins so; there are "
                             f"{', '.join(sorted(known))}.")
    lower_for(settings)
    folder = Path(values["folder"].value) if values["folder"].value else None
    path, results = run(settings, ops, str(name or default_name(settings)), folder, processes)
    print(report.table(results.lines))
    for kind in ("checks", "failed", "left_out"):
        for entry in getattr(results, kind):
            print(f"{kind}: {entry}")
    print("wrote", path)
    draw(path)
    return 0 if results.is_good else 1


def run(settings: Settings, ops: Sequence[str], name: str, folder: Path | None, processes: int = 1) -> tuple[Path, Results]:
    """Measures the groups, in turn or shared among processes; the result file <folder>/<name>.json is written anew after each row."""
    report.require_folder(folder)
    results = Results(settings=settings, ceilings=measure_ceilings(tiny=settings.tiny))
    print(f"{jax.local_devices()[0].device_kind}, path {path_of(settings)}: copy {results.ceilings.bytes_per_s / 1e12:.3g} TB/s, bfloat16 "
          f"matmul {results.ceilings.flops_per_s / 1e12:.4g} TFLOP/s", flush=True)

    def save() -> Path:
        return report.write(name, results.figures(), folder)

    def show(text: str) -> None:
        print(text, flush=True)

    groups = [functools.partial(of_shapes, GROUPS[op]) for op in ops]
    if processes > 1:
        run_groups(groups, results, show, save, processes=processes)
    else:
        for group in groups:
            run_group(group(settings), results, show, save)
    return save(), results


def default_name(settings: Settings) -> str:
    """kernels-<device>, with what is not the usual."""
    device = jax.local_devices()[0].device_kind.lower().replace(" ", "-")
    return f"kernels-{device}{f'-as-sm{settings.arch}' if settings.arch else ''}{'-tiny' if settings.tiny else ''}"


def draw(path: Path) -> int:
    """A picture beside a result file. Exit status 1 where there is no such file."""
    if not path.is_file():
        print(f"--plot={path}: there is no such file. Give a result file of this program.", file=sys.stderr)
        return 1
    drawn = plot.draw(path)
    if drawn:
        print("drew", drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
