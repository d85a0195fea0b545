"""Makes a Hugging Face checkpoint of any size that takes no disk: every name, shape and shard of a real one, all zeros, in sparse files.

  python -m bench.sparse_checkpoint --config=config.json --index=model.safetensors.index.json --output=DIR
  python -m convert --model=DIR --output=OUT

The conversion then reads and writes as much as the real checkpoint's would, so its time and its peak memory can be measured. Its output does
take disk.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxinfer import cli
from jaxinfer.errors import CheckpointError

ITEM_BYTES = 2
"""Of bfloat16."""


def make(config_path: Path, index_path: Path, output: Path) -> int:
    """Makes the folder; returns the bytes that its tensors claim.

    Raises:
      CheckpointError: the index does not name exactly the tensors of the config, or their sizes do not add up to its total_size.
    """
    from convert.families import FAMILIES
    from jaxinfer.models.registry import abstract_params, read_model_config

    config, index = json.loads(config_path.read_text()), json.loads(index_path.read_text())
    model = read_model_config(config)
    params = abstract_params(model, "bfloat16")
    table = FAMILIES[model.architecture](model)
    shapes = {part.source: part.source_shape(params[entry.target].shape) for entry in table for part in entry.parts}
    weight_map = index["weight_map"]
    if shapes.keys() != weight_map.keys():
        raise CheckpointError(f"{index_path} and {config_path} differ in the tensors {sorted(shapes.keys() ^ weight_map.keys())[:5]}")
    total = ITEM_BYTES * sum(map(math.prod, shapes.values()))
    if total != index["metadata"]["total_size"]:
        raise CheckpointError(f"{index_path} says {index['metadata']['total_size']} bytes, the shapes of {config_path} take {total}")
    output.mkdir(parents=True)
    for shard in sorted(set(weight_map.values())):
        _write_sparse(output / shard, {name: shape for name, shape in shapes.items() if weight_map[name] == shard})
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    (output / "config.json").write_text(json.dumps(config))
    return total


def _write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of which only the header is written; the rest is a hole, which reads as zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + ITEM_BYTES * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "The model's config.json.", flag_values=values)
    flags.DEFINE_string("index", None, "Its model.safetensors.index.json.", flag_values=values)
    flags.DEFINE_string("output", None, "Folder to make; it must not exist.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    given: dict[str, Any] = values.flag_values_dict()
    for name in ("config", "index", "output"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
    output = Path(given["output"])
    if output.exists():
        raise app.UsageError(f"--output={output} exists")
    total = make(Path(given["config"]), Path(given["index"]), output)
    disk = sum(path.stat().st_blocks * 512 for path in output.iterdir())
    print(f"{output}: {total / 1e9:.2f} GB of tensors, {disk / 1e3:.0f} kB on disk")


if __name__ == "__main__":
    sys.exit(main())
