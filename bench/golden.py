"""A checkpoint against a golden file made by transformers: argmax where it is clear, the free greedy run, perplexity, chat.

Each is taken twice: from the dense forward pass, which has no pages, and through the engine, its pages and the attention kernels that it
chooses (printed): prefill by the log-probabilities of prompts, decode by generating from one unclear position to the next.

  python -m bench.golden --model=DIR_OR_GGUF --golden=tests/fixtures/smollm2_golden.json [--dtype=float32]
  python -m bench.golden --model=DIR_OR_GGUF --question='What is the capital of Japan? Answer in one word.' --expect=Tokyo \\
      [--hf_python=PYTHON_WITH_TORCH --hf_model=FOLDER_OR_GGUF]
Exit status 1 where anything disagrees.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags

from bench import report
from jaxinfer import cli

if TYPE_CHECKING:
    from jaxinfer import LLM

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_MODEL = flags.DEFINE_string("model", None, "Converted checkpoint, Hugging Face folder or .gguf file.", required=True, flag_values=_FLAGS)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Dtype to run in.", flag_values=_FLAGS)
_GOLDEN = flags.DEFINE_string("golden", None, "JSON with `golden` (ids, new, margin), `ppl`, `ppl_ids` and `window`.", flag_values=_FLAGS)
_ATTENTION = flags.DEFINE_string("attention_implementation", "auto", "Attention kernel that the engine must take; auto lets it choose.",
                                 flag_values=_FLAGS)
_MARGIN = flags.DEFINE_float("margin", None, "Top-2 logit margin from which a position counts as clear; default: 0.05 in float32, 0.4 in "
                             "16 bits.", flag_values=_FLAGS)
_PPL_TOLERANCE = flags.DEFINE_float("ppl_tolerance", None, "Relative difference of perplexity allowed; default: 0.002 in float32, 0.005 in "
                                    "16 bits.", flag_values=_FLAGS)
_QUESTION = flags.DEFINE_string("question", None, "Asked through the chat template, greedily.", flag_values=_FLAGS)
_EXPECT = flags.DEFINE_string("expect", None, "Text that the answer must contain.", flag_values=_FLAGS)
_FOLDER = flags.DEFINE_string("folder", None, "Where the result file goes; default: bench/results.", flag_values=_FLAGS)
_HF_PYTHON = flags.DEFINE_string("hf_python", None, "Interpreter with torch and transformers, to render the chat template independently.",
                                 flag_values=_FLAGS)
_HF_MODEL = flags.DEFINE_string("hf_model", None, "What that interpreter loads: Hugging Face folder or .gguf file.", flag_values=_FLAGS)

# What a dtype's rounding may do to the difference of two logits, and to perplexity. Measured on SmolLM2's golden positions: bfloat16 moves
# the difference of the two likeliest by 0.09 (root mean square) and 0.35 at most.
CLEAR_MARGIN = {"float32": 0.05}
CLEAR_MARGIN_16_BIT = 0.4
PPL_TOLERANCE = {"float32": 0.002}
PPL_TOLERANCE_16_BIT = 0.005

_RENDER = """
import json, os, sys
from transformers import AutoTokenizer
path, messages = sys.argv[1], json.loads(sys.argv[2])
where = dict(gguf_file=os.path.basename(path)) if path.endswith('.gguf') else {}
tokenizer = AutoTokenizer.from_pretrained(os.path.dirname(path) if where else path, **where)
out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
print(json.dumps(list(out['input_ids'])))
"""


def teacher_forced(logits: Callable[..., Any], golden: list[dict[str, Any]], margin: float) -> dict[str, Any]:
    """Argmax of the dense forward pass along the golden continuation, at positions whose margin is clear."""
    longest = max(len(g["ids"]) + len(g["new"]) for g in golden)
    found = []
    for g in golden:
        ids = np.zeros((1, longest), np.int32)
        sequence = g["ids"] + g["new"]
        ids[0, :len(sequence)] = sequence
        out = np.asarray(logits(ids, np.array([len(sequence)], np.int32)))[0, len(g["ids"]) - 1:len(sequence) - 1]
        found.append(out.argmax(-1).tolist())
    return compare(found, golden, margin)


def compare(found: list[list[int | None]], golden: list[dict[str, Any]], margin: float) -> dict[str, Any]:
    """Tokens found at each golden position (None where none was asked for) against the golden's, where its margin is clear."""
    triples = [t for tokens, g in zip(found, golden, strict=True) for t in zip(tokens, g["new"], g["margin"], strict=True)]
    clear = [(got, want) for got, want, gap in triples if got is not None and gap > margin]
    equal = sum(got == want for got, want in clear)
    return {"positions": len(triples), "clear": sum(gap > margin for _, _, gap in triples), "tested": len(clear), "equal_where_clear": equal,
            "margin": margin, "ok": equal == len(clear)}


def prefill_forced(llm: "LLM", golden: list[dict[str, Any]], margin: float) -> dict[str, Any]:
    """The same through the engine's prefill: the likeliest token before each token of prompt and continuation, read as one prompt."""
    outs = scored(llm, [g["ids"] + g["new"] for g in golden])
    found: list[list[int | None]] = [[next(t for t, p in at.items() if p.rank == 1) for at in out[len(g["ids"]):]]
                                     for g, out in zip(golden, outs, strict=True)]
    return compare(found, golden, margin)


def scored(llm: "LLM", prompts: list[list[int]]) -> list[list[Any]]:
    """Log-probabilities of each prompt's tokens and of the likeliest one at each place; None for the first token."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [out.prompt_logprobs or [] for out in outs]


def decode_forced(llm: "LLM", golden: list[dict[str, Any]], margin: float) -> dict[str, Any]:
    """The same through the engine's decode: greedy generation from behind each unclear position up to the next.

    The first token of a stretch comes from the prefill of its prompt and is left to `prefill_forced`, so fewer positions are tested.
    """
    import jaxinfer

    stretches = [(i, start, stop) for i, g in enumerate(golden) for start, stop in clear_stretches(g["margin"], margin)]
    prompts = [{"prompt_token_ids": golden[i]["ids"] + golden[i]["new"][:start]} for i, start, _ in stretches]
    params = [jaxinfer.SamplingParams(temperature=0, max_tokens=stop - start, ignore_eos=True) for _, start, stop in stretches]
    found: list[list[int | None]] = [[None] * len(g["new"]) for g in golden]
    for (i, start, stop), out in zip(stretches, llm.generate(prompts, params), strict=True):
        found[i][start + 1:stop] = out.outputs[0].token_ids[1:]
    return {**compare(found, golden, margin), "stretches": len(stretches)}


def clear_stretches(margins: list[float], margin: float) -> list[tuple[int, int]]:
    """[start, stop) of the runs of at least two clear positions; what a run generates before its end is then known."""
    runs, start = [], 0
    for i, gap in enumerate([*margins, -math.inf]):
        if gap <= margin:
            if i - start > 1:
                runs.append((start, i))
            start = i + 1
    return runs


def perplexity(logits: Callable[..., Any], ids: list[int], window: int) -> float:
    """exp of the mean negative log-likelihood over windows of `window` ids, each from its own start; a shorter last one counts too."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window - 1):
        part = ids[start:start + window]
        padded = np.zeros((1, window), np.int32)
        padded[0, :len(part)] = part
        out = np.asarray(logits(padded, np.array([len(part)], np.int32)), np.float64)[0, :len(part) - 1]
        top = out.max(-1, keepdims=True)
        log_z = top[:, 0] + np.log(np.exp(out - top).sum(-1))
        total += float((log_z - out[np.arange(len(part) - 1), part[1:]]).sum())
        count += len(part) - 1
    return math.exp(total / count)


def engine_perplexity(llm: "LLM", ids: list[int], window: int) -> float:
    """`perplexity` through the engine's prefill, over the same windows."""
    parts = [ids[start:start + window] for start in range(0, len(ids) - 1, window - 1)]
    logprobs = [at[token].logprob for part, out in zip(parts, scored(llm, parts), strict=True)
                for token, at in zip(part[1:], out[1:], strict=True)]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def free_run(llm: "LLM", golden: list[dict[str, Any]], margin: float, *, together: bool) -> dict[str, Any]:
    """Greedy generation through the engine, compared up to each prompt's first unclear position."""
    import jaxinfer

    params = [jaxinfer.SamplingParams(temperature=0, max_tokens=len(g["new"]), ignore_eos=True) for g in golden]
    prompts = [{"prompt_token_ids": g["ids"]} for g in golden]
    outs = llm.generate(prompts, params) if together else [llm.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    compared = wrong = 0
    for g, out in zip(golden, outs, strict=True):
        for got, want, gap in zip(out.outputs[0].token_ids, g["new"], g["margin"], strict=True):
            if gap <= margin:
                break
            compared += 1
            wrong += got != want
    return {"batched": together, "tokens_compared": compared, "wrong": wrong, "ok": wrong == 0}


def run_golden(llm: "LLM", path: Path) -> dict[str, Any]:
    """All comparisons with one golden file."""
    from jaxinfer.engine.compiled import jit_logits

    data = json.loads(path.read_text())
    golden, ids, window = data["golden"], data["ppl_ids"], data["window"]
    margin = _MARGIN.value if _MARGIN.value is not None else CLEAR_MARGIN.get(_DTYPE.value, CLEAR_MARGIN_16_BIT)
    tolerance = _PPL_TOLERANCE.value if _PPL_TOLERANCE.value is not None else PPL_TOLERANCE.get(_DTYPE.value, PPL_TOLERANCE_16_BIT)

    def judged(ours: float) -> dict[str, Any]:
        relative = ours / data["ppl"] - 1
        return {"ours": ours, "golden": data["ppl"], "relative": relative, "tolerance": tolerance, "ok": abs(relative) <= tolerance}

    logits = jit_logits(llm.engine.model)
    return {
        "dense_forced": teacher_forced(logits, golden, margin), "engine_prefill_forced": prefill_forced(llm, golden, margin),
        "engine_decode_forced": decode_forced(llm, golden, margin), "free_batched": free_run(llm, golden, margin, together=True),
        "free_one_by_one": free_run(llm, golden, margin, together=False), "dense_perplexity": judged(perplexity(logits, ids, window)),
        "engine_perplexity": judged(engine_perplexity(llm, ids, window))}


def kernels(llm: "LLM") -> list[str]:
    """Which attention implementation each kind of step takes, and why."""
    from jaxinfer.engine.layer_kernels import attention_choice

    resolved = llm.engine.resolved
    kinds = {layout.decode_only: attention_choice(resolved, layout) for layout in resolved.layouts}
    return [f"{'decode' if decode_only else 'prefill and mixed'}, H {resolved.model.head_dim}, pages of {resolved.page_size}: {choice}"
            for decode_only, choice in kinds.items()]


def run_question(llm: "LLM") -> dict[str, Any]:
    """Asks through the chat template and, with --hf_python, compares the rendered ids."""
    import jaxinfer

    messages = [{"role": "user", "content": _QUESTION.value}]
    (out,) = llm.chat(messages, jaxinfer.SamplingParams(temperature=0, max_tokens=32))
    answer = {"question": _QUESTION.value, "answer": out.outputs[0].text, "finish_reason": out.outputs[0].finish_reason,
              "ok": _EXPECT.value is None or _EXPECT.value in out.outputs[0].text}
    if _HF_PYTHON.value is None:
        return {"chat": answer}
    done = subprocess.run([_HF_PYTHON.value, "-c", _RENDER, _HF_MODEL.value or _MODEL.value, json.dumps(messages)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise app.UsageError(f"rendering under --hf_python={_HF_PYTHON.value} failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    return {"chat": answer, "template": {"num_ids": len(theirs), "ok": theirs == list(out.prompt_token_ids)}}


def main(argv: list[str]) -> int:
    import jaxinfer

    if _GOLDEN.value is None and _QUESTION.value is None:
        raise app.UsageError("give --golden, --question or both.")
    llm = jaxinfer.LLM(_MODEL.value, dtype=_DTYPE.value, max_model_len=2048, attention_implementation=_ATTENTION.value)
    print(*kernels(llm), sep="\n")
    figures = run_golden(llm, Path(_GOLDEN.value)) if _GOLDEN.value else {}
    if _QUESTION.value:
        figures |= run_question(llm)
    for name, values in figures.items():
        print(f"{name}: {values}")
    platform = llm.engine.resolved.hardware.platform
    name = f"golden-{Path(_MODEL.value).stem}-{_DTYPE.value}{'' if platform == 'cpu' else f'-{platform}'}"
    path = report.write(name, {"model": Path(_MODEL.value).name, "dtype": _DTYPE.value, "kernels": kernels(llm), **figures},
                        Path(_FOLDER.value) if _FOLDER.value else None)
    print("wrote", path)
    return 0 if all(v["ok"] for v in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(cli.run(main, _FLAGS))
