"""Converts a Hugging Face folder, a GGUF file or a model of the Hugging Face hub into a checkpoint for jaxinfer.

Weights that AutoAWQ (gemm), GPTQ or compressed-tensors quantised stay the integers that they are; those of GGUF files are dequantised.

  python -m convert --model=FOLDER|FILE.gguf|ORG/NAME --output=DIR [--dtype=bfloat16] [--verify] [--resume] [--overwrite]
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from absl import app, flags

from jaxinfer import cli

DTYPES = ("auto", "bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "What to convert: a Hugging Face folder, a .gguf file, or an id of the Hugging Face hub, org/name or "
                        "org/name@revision.", flag_values=values)
    flags.DEFINE_string("output", None, "Folder to make. It appears only when complete.", flag_values=values)
    flags.DEFINE_enum("dtype", "auto", DTYPES, "Type of the stored weights, but for quantised ones. auto keeps the source's; a quantised "
                      ".gguf file becomes bfloat16.", flag_values=values)
    flags.DEFINE_bool("overwrite", False, "Replace a checkpoint at --output once the new one is complete.", flag_values=values)
    flags.DEFINE_bool("resume", False, "When interrupted, keep what is complete; started again with --resume, continue there.",
                      flag_values=values)
    flags.DEFINE_bool("verify", False, "Compare the result's logits with an independent float32 computation from the source, and record it.",
                      flag_values=values)
    flags.DEFINE_bool("progress", True, "Show progress on stderr.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    given: dict[str, Any] = values.flag_values_dict()
    for name in ("model", "output"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
        cli.expanded(name, given[name])
    os.environ["JAX_PLATFORMS"] = "cpu"  # conversion is the host's work; a GPU is left alone
    signal.signal(signal.SIGTERM, _terminate)
    from convert.converter import convert  # seconds of imports, which Ctrl-C may end too

    try:
        convert(given["model"], given["output"], dtype=given["dtype"], overwrite=given["overwrite"], progress=given["progress"],
                resume=given["resume"], verify_logits=given["verify"])
    except SystemExit:
        print("terminated", file=sys.stderr)
        raise


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as an exception does, so that nothing is left behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
