"""Runs a dumped step again on the CPU, through the reference implementations and one operation after the other.

  python -m jaxinfer.replay --dump=step-00000012.safetensors --model=DIR

For each row of the step it names the layer and the operation where numbers first were not finite, or says how the token compares with
the one that the device gave. Exit codes: 0 every number is finite and every token the same, 1 not so, or the file or the model cannot
be used, 2 the command line is wrong.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from jaxinfer import cli
from jaxinfer.errors import DumpError

if TYPE_CHECKING:
    from jaxinfer.engine.dump import StepDump
    from jaxinfer.engine.load import LoadedModel
    from jaxinfer.engine.oracle import Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReplay:
    """What became of one row."""

    request_id: str
    origin: "Origin | None"
    """Where it first was not finite; None where it is finite."""
    token: int | None
    """The token sampled now; None where the row samples none, or its numbers or its processors do not allow it."""
    dumped_token: int | None
    """What the device gave; None where the row samples none, or the device called it not finite."""
    margin: float | None
    """The logit of `token` less that of `dumped_token`, before rules, where both are there."""
    note: str = ""
    """What kept it from being replayed in full."""

    @property
    def agrees(self) -> bool:
        return self.origin is None and self.token == self.dumped_token and not self.note

    def __str__(self) -> str:
        if self.origin is not None:
            said = f"not finite, first in {_layer(self.origin.scope)}: {self.origin}"
        elif self.note:
            said = self.note
        elif self.token is None:
            said = "finite; it samples no token"
        elif self.dumped_token is None:
            said = f"finite here (token {self.token}), and not on the device: look at its kernels, or at pages that were wrong there"
        elif self.token == self.dumped_token:
            said = f"token {self.token}, the same as dumped"
        else:
            said = f"token {self.token}, dumped {self.dumped_token}; their logits differ by {self.margin:.3g}"
        return f"request {self.request_id!r}: {said}"


def replay(dump: "StepDump", model: "LoadedModel") -> list[RowReplay]:
    """Runs a step again, row by row.

    Args:
      dump: from engine/dump.py:read_dump.
      model: the one that ran it, in the same dtype.

    Raises:
      DumpError: it is another model.
    """
    from jaxinfer.engine.dump import config_differences

    different = config_differences(dump.header, model.config)
    if different:
        raise DumpError(f"the step was run by another model: here {'; '.join(different[:3])}. Give the model that --dump_step ran with.")
    return [_replay_row(dump, model, b) for b in range(len(dump.header["rows"]))]


def _replay_row(dump: "StepDump", model: "LoadedModel", b: int) -> RowReplay:
    import numpy as np

    row = dump.header["rows"][b]
    logits, origin = _logits(dump, model, b)
    finite = bool(dump.tensors["finite"][b])
    dumped = int(dump.tensors["tokens"][b]) if row["samples"] and finite else None
    token, note = (None, "") if origin is not None or not row["samples"] else _token(dump, b, logits)
    margin = None if token is None or dumped is None else float(np.asarray(logits)[0, token] - np.asarray(logits)[0, dumped])
    return RowReplay(request_id=row["request_id"], origin=origin, token=token, dumped_token=dumped, margin=margin, note=note)


def _logits(dump: "StepDump", model: "LoadedModel", b: int) -> tuple[Any, "Origin | None"]:
    """Logits [1, V] after the row's last token, and where they first were not finite."""
    import jax.numpy as jnp

    from jaxinfer.engine.oracle import run_traced
    from jaxinfer.layers.attention import DenseContext, PagedContext
    from jaxinfer.layers.forced import ForcedKernels
    from jaxinfer.models.registry import bind
    from jaxinfer.state import KVCache

    row, num_layers = dump.header["rows"][b], model.config.num_layers
    known = [*row["prompt_token_ids"], *row["output_token_ids"]]
    stop = row["start"] + row["num_tokens"]
    start = row["start"] if row["has_pages"] else 0
    ids = jnp.asarray(known[start:stop], jnp.int32)
    positions, prompt_lens = jnp.arange(start, stop, dtype=jnp.int32), jnp.asarray([len(row["prompt_token_ids"])], jnp.int32)
    one = jnp.asarray([stop], jnp.int32)
    keys, values, table = _cached(dump, b, num_layers) if row["has_pages"] else ((), (), None)

    def forward(args: dict[str, Any]) -> Any:
        module = bind(model.graphdef, args["weights"])
        if table is None:
            hidden, _ = module(ids, positions, DenseContext(lengths=one, prompt_lens=prompt_lens))
        else:
            cache = KVCache(k=tuple(args["cached keys of layer"]), v=tuple(args["cached values of layer"]))
            hidden, _ = module(ids, positions, PagedContext(
                cache=cache, page_table=table, cu_q_lens=jnp.asarray([0, stop - start], jnp.int32), kv_lens=one, prompt_lens=prompt_lens,
                max_q_len=None, forced=ForcedKernels(attention="reference", rotary="reference")))
        return module.logits(hidden[-1:])[:, :dump.header["num_valid_tokens"]]

    logits, (origin,) = run_traced(forward, {"weights": model.params, "cached keys of layer": keys, "cached values of layer": values})
    return logits, origin


def _cached(dump: "StepDump", b: int, num_layers: int) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """What the row found in its pages: keys and values of each layer [P', K, Z, H], zero from the row's start on, and its table [1, M']."""
    import jax.numpy as jnp
    import numpy as np

    row, size = dump.header["rows"][b], dump.header["page_size"]
    num_pages = -(-(row["start"] + row["num_tokens"]) // size)
    own = np.searchsorted(dump.tensors["pages"], dump.tensors["page_table"][b, :num_pages])
    filled = np.arange(num_pages * size).reshape(num_pages, 1, size, 1) < row["start"]

    def pool(name: str, layer: int) -> Any:
        mine = np.where(filled, dump.cache(name, layer)[own], 0)
        return jnp.asarray(np.concatenate([np.zeros_like(mine[:1]), mine]))  # page 0 is the null page

    keys, values = (tuple(pool(name, layer) for layer in range(num_layers)) for name in "kv")
    return keys, values, jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None]


def _token(dump: "StepDump", b: int, logits: Any) -> tuple[int | None, str]:
    """The token that the row's settings make of the logits, or why it cannot be said."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxinfer.engine.oracle import run_traced
    from jaxinfer.sampling.params import SamplingParams
    from jaxinfer.sampling.processors import registered_processors
    from jaxinfer.sampling.rules import recent_tokens, token_counts, token_rules
    from jaxinfer.sampling.sampler import sample
    from jaxinfer.state import SlotTables

    row, vocab_size = dump.header["rows"][b], dump.header["model"]["vocab_size"]
    # What has been used up: the grammar is in the mask.
    params = SamplingParams(**{k: v for k, v in row["params"].items() if k != "structured_outputs"})
    processors = registered_processors()
    missing = sorted((params.logits_processors or {}).keys() - {p.name for p in processors.processors})
    if missing:
        return None, f"finite; its logits processors {', '.join(missing)} are not registered here, so that its token cannot be compared"
    rules = token_rules(params, row["bad_word_ids"], row["end_token_ids"], vocab_size=vocab_size, processors=processors)
    if row["has_grammar"]:
        rules = dataclasses.replace(rules, masks=np.stack([dump.tensors["masks"][b]] * 2))
    prompt, output = row["prompt_token_ids"], row["output_token_ids"]
    slots = SlotTables(
        recent_tokens=jnp.asarray(recent_tokens(len(prompt), output))[None],
        counts=jnp.asarray(token_counts(prompt, output, vocab_size=vocab_size))[None],
        rules=jax.tree.map(lambda x: jnp.asarray(x)[None], rules))
    sampling, _ = dump.layout.unpack_rows(jnp.asarray(dump.tensors["buffer"]))
    sampling = dataclasses.replace(jax.tree.map(lambda x: x[b:b + 1], sampling), slots=jnp.zeros(1, jnp.int32))
    valid = dump.header["num_valid_tokens"]
    padded = jnp.pad(jnp.asarray(logits), ((0, 0), (0, vocab_size - valid)))
    (tokens, possible), _ = run_traced(
        lambda args: sample(args["logits"], args["sampling"], args["slots"], num_valid_tokens=valid, processors=processors),
        {"logits": padded, "sampling": sampling, "slots": slots})
    return (int(tokens[0]), "") if possible[0] else (None, "finite; its rules leave no token to sample, here as there")


def _layer(scope: str) -> str:
    """'layer 3' of a scope such as layer_3/mlp/down; what stands outside the layers is named by its scope."""
    first = scope.partition("/")[0]
    return first.replace("_", " ") if first.startswith("layer_") else first or "the final norm or the head"


def report(dump: "StepDump", rows: Sequence[RowReplay]) -> str:
    """The outcome for a person: a line for the step, one for each row, one for all."""
    h = dump.header
    agree = sum(row.agrees for row in rows)
    return "\n".join([
        f"step {h['number']} ({h['reason']}) of {h['model']['architecture']} in {h['dtype']} on {h['device']}, "
        f"jaxinfer {h['versions']['jaxinfer']}, jax {h['versions']['jax']}",
        *map(str, rows), f"{agree} of {len(rows)} rows are finite and as dumped"])


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    for name, help in (("dump", "The file that --dump_step wrote."), ("model", "The model that ran it: converted folder, Hugging Face folder "
                                                                               "or .gguf file.")):
        flags.DEFINE_string(name, None, help, flag_values=values, module_name="What")
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> int:
    file, name = values["dump"].value, values["model"].value
    if not file or not name:
        raise app.UsageError(f"--{'model' if file else 'dump'} is missing.")
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxinfer.engine.dump import read_dump
    from jaxinfer.engine.load import load
    from jaxinfer.source import converted_checkpoint

    dump = read_dump(cli.expanded("dump", file))
    model = load(converted_checkpoint(name, dtype="auto"), dtype=dump.header["dtype"])
    rows = replay(dump, model)
    print(report(dump, rows))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
