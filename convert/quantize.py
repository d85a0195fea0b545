"""Quantises a converted checkpoint to 4 or 8 bits.

  python -m convert.quantize --model=DIR --output=DIR --method=awq|gptq|rtn --calibration=FILE.jsonl|FILE.txt
      [--bits=4 --group_size=128 --zero_point --num_samples=128 --max_len=512 --seed=0 --keep_int8=auto:N --eval_text=FILE --resume]
      [--lm_head=none|int4|int8 --embedding=none|int4|int8]
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from absl import app, flags

from jaxinfer import cli
from jaxinfer.quant import METHODS_OF

GROUP_SIZES = ["32", "64", "128", "column"]
TABLE_BITS = {"none": None, "int4": 4, "int8": 8}
TEXT_OF = {"num_samples": ("calibration",), "seed": ("calibration", "eval_text"), "max_len": ("calibration", "eval_text"),
           "num_eval_samples": ("eval_text",)}
"""Flags that say how a text is read -> the flags that give one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    _define_what(values)
    _define_how(values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _define_what(values: flags.FlagValues) -> None:
    """Model, texts and output."""
    flags.DEFINE_string("model", None, "A converted, unquantised checkpoint.", flag_values=values)
    flags.DEFINE_string("output", None, "Folder to make. It appears only when complete.", flag_values=values)
    flags.DEFINE_string("calibration", None, "Text to calibrate on: .jsonl with {\"text\": ...} or {\"messages\": [...]} a line, or plain "
                        "text. rtn does without.", flag_values=values)
    flags.DEFINE_integer("num_samples", 128, "Calibration windows.", 1, flag_values=values)
    flags.DEFINE_integer("max_len", 512, "Tokens of a window.", 2, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of the choice of windows.", 0, flag_values=values)
    flags.DEFINE_string("eval_text", None, "Held-out text: perplexity before and after.", flag_values=values)
    flags.DEFINE_integer("num_eval_samples", 32, "Evaluation windows.", 1, flag_values=values)
    flags.DEFINE_bool("resume", False, "When interrupted, keep finished layers; started again with --resume, continue there.",
                      flag_values=values)
    flags.DEFINE_bool("overwrite", False, "Replace a checkpoint at --output once the new one is complete.", flag_values=values)


def _define_how(values: flags.FlagValues) -> None:
    """Method and grid."""
    flags.DEFINE_enum("method", "awq", ["awq", "gptq", "rtn"], "awq searches scales and clipping and, as gptq does, feeds "
                      "rounding errors back; rtn rounds to nearest.", flag_values=values)
    flags.DEFINE_enum("bits", "4", ["4", "8"], "Bits of a weight.", flag_values=values)
    flags.DEFINE_enum("group_size", "128", GROUP_SIZES, "Inputs that share a scale.", flag_values=values)
    flags.DEFINE_bool("zero_point", True, "Give each group a zero point; --nozero_point is symmetric.", flag_values=values)
    flags.DEFINE_bool("symmetric", False, "Another spelling of --nozero_point.", flag_values=values)
    flags.DEFINE_string("keep_int8", "auto:0", "auto:N keeps the N linears of largest output error at 8 bits.", flag_values=values)
    flags.DEFINE_enum("lm_head", "none", list(TABLE_BITS), "Quantise the vocabulary head too, in the same groups, by the method but "
                      "without awq's scales. Where embeddings are tied, the head becomes a copy of its own.", flag_values=values)
    flags.DEFINE_enum("embedding", "none", list(TABLE_BITS), "Quantise the embedding too, to nearest, and with it a head that is tied to it "
                      "and has no --lm_head. No format of other libraries has this: such a model cannot be exported.", flag_values=values)
    flags.DEFINE_enum("awq_scaling", "auto", ["auto", "duo", "activation", "norms"], "awq: rules whose scales are searched. duo: "
                      "a^r / w^(1-r); activation: a^r; norms: ||x|| / ||w||; auto: duo and norms.", flag_values=values)
    flags.DEFINE_enum("awq_rounding", "feedback", ["feedback", "nearest"], "awq: round scaled weights with gptq's error feedback, or to "
                      "nearest as AWQ's paper does.", flag_values=values)
    flags.DEFINE_bool("clip", True, "awq: search clipping too.", flag_values=values)
    flags.DEFINE_float("damping", None, "gptq, and awq with feedback: share of the Hessian's mean diagonal added to it; default: 0.01 and 0.1.",
                       flag_values=values)
    flags.DEFINE_bool("act_order", False, "gptq: round the rows of the largest inputs first, on grids made beforehand.", flag_values=values)
    flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Of activations on their way through the layers; bfloat16 is "
                      "faster on GPUs and on CPUs with AMX. All sums are float32.", flag_values=values)


def _run(values: flags.FlagValues) -> None:
    given: dict[str, Any] = values.flag_values_dict()
    for name in ("model", "output"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
    paths = {name: cli.expanded(name, given[name]) if given[name] else None for name in ("model", "output", "calibration", "eval_text")}
    num_int8 = _number_kept(given["keep_int8"])
    _check_meaning(values)
    signal.signal(signal.SIGTERM, _terminate)
    from convert.quantise.grid import GridSpec  # seconds of imports, which Ctrl-C may end too
    from convert.quantise.methods import QuantiseConfig
    from convert.quantise.run import Texts, quantise

    group_size = None if given["group_size"] == "column" else int(given["group_size"])
    grid = GridSpec(bits=int(given["bits"]), group_size=group_size, symmetric=given["symmetric"] or not given["zero_point"])
    settings = QuantiseConfig(method=given["method"], grid=grid, awq_scaling=given["awq_scaling"],
                              awq_rounding=given["awq_rounding"], clip=given["clip"], damping=given["damping"],
                              act_order=given["act_order"], num_int8=num_int8, compute_dtype=given["compute_dtype"],
                              lm_head_bits=TABLE_BITS[given["lm_head"]], embedding_bits=TABLE_BITS[given["embedding"]])
    texts = Texts(calibration=paths["calibration"], num_samples=given["num_samples"], max_len=given["max_len"], seed=given["seed"],
                  evaluation=paths["eval_text"], num_eval_samples=given["num_eval_samples"])
    model, output = paths["model"], paths["output"]
    assert isinstance(model, Path) and isinstance(output, Path)
    quantise(model, output, settings=settings, texts=texts, overwrite=given["overwrite"], resume=given["resume"])


def _check_meaning(values: flags.FlagValues) -> None:
    """Refuses a flag that was given and would change nothing."""
    method = values["method"].value
    for name, methods in METHODS_OF.items():
        if values[name].present and method not in methods:
            raise app.UsageError(f"--{name} changes nothing under --method={method}: leave it out, or choose {' or '.join(methods)}")
    for name, text in TEXT_OF.items():
        if values[name].present and not any(values[needed].value for needed in text):
            raise app.UsageError(f"--{name} changes nothing without --{' or --'.join(text)}: leave it out, or give that text")
    if values["damping"].present and method == "awq" and values["awq_rounding"].value == "nearest":
        raise app.UsageError("--damping changes nothing under --awq_rounding=nearest: leave out one of them")


def _number_kept(text: str) -> int:
    """N of auto:N."""
    kind, colon, number = text.partition(":")
    if kind != "auto" or not colon or not number.isdecimal():
        raise app.UsageError(f"--keep_int8={text}: must be auto:N, N linears of largest output error")
    return int(number)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as an exception does, so that nothing is left behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
