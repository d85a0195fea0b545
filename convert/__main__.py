"""`python -m convert`: flags, logging and exit codes round convert.converter.convert. Nothing is converted here."""

import logging
import os
import signal
import sys
from types import FrameType

from absl import app, flags
from absl import logging as absl_logging

from jaxinfer.errors import JaxInferError

MODEL = flags.DEFINE_string("model", None, "What to convert: a Hugging Face folder or a .gguf file.")
OUTPUT = flags.DEFINE_string("output", None, "Folder to make. It appears only when complete.")
DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float16", "float32"],
                          "Type of the stored weights. auto keeps the source's; a quantised .gguf file becomes bfloat16.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a checkpoint at --output once the new one is complete.")
PROGRESS = flags.DEFINE_bool("progress", True, "Show progress on stderr.")

USAGE = """Converts a Hugging Face folder or a GGUF file into a checkpoint for jaxinfer.

    python -m convert --model=FOLDER|FILE.gguf --output=DIR [--dtype=bfloat16] [--overwrite]
"""


def run(argv: list[str]) -> None:
    """Converts as the flags say; exits with 1 after an error that it names, 130 after Ctrl-C."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {' '.join(argv[1:])!r}: everything is given by flags, such as --model=...")
    if not MODEL.value or not OUTPUT.value:
        raise app.UsageError(f"--{'output' if MODEL.value else 'model'} is needed")
    os.environ["JAX_PLATFORMS"] = "cpu"  # conversion is the host's work; a GPU is left alone
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("convert").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from convert.converter import convert  # seconds of imports, which Ctrl-C may end too

        convert(MODEL.value, OUTPUT.value, dtype=DTYPE.value, overwrite=OVERWRITE.value, progress=PROGRESS.value)
    except JaxInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as an exception does, so that nothing is left behind."""
    sys.exit(128 + number)


def main() -> None:
    """Entry point of the console command."""
    sys.modules["__main__"].__doc__ = USAGE
    app.run(run)


if __name__ == "__main__":
    main()
