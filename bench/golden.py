"""A checkpoint against a golden file made by transformers: argmax where it is clear, the free greedy run, perplexity, chat.

  python -m bench.golden --model=DIR --golden=tests/fixtures/smollm2_golden.json [--dtype=float32]
  python -m bench.golden --model=DIR --question='What is the capital of Japan? Answer in one word.' --expect=Tokyo \\
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

_MODEL = flags.DEFINE_string("model", None, "Converted checkpoint, Hugging Face folder or .gguf file.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Dtype to run in.")
_GOLDEN = flags.DEFINE_string("golden", None, "JSON with `golden` (ids, new, margin), `ppl`, `ppl_ids` and `window`.")
_MARGIN = flags.DEFINE_float("margin", 0.05, "Top-2 logit margin from which a position counts as clear.")
_PPL_TOLERANCE = flags.DEFINE_float("ppl_tolerance", 0.002, "Relative difference of perplexity allowed.")
_QUESTION = flags.DEFINE_string("question", None, "Asked through the chat template, greedily.")
_EXPECT = flags.DEFINE_string("expect", None, "Text that the answer must contain.")
_HF_PYTHON = flags.DEFINE_string("hf_python", None, "Interpreter with torch and transformers, to render the chat template independently.")
_HF_MODEL = flags.DEFINE_string("hf_model", None, "What that interpreter loads: Hugging Face folder or .gguf file.")

_RENDER = """
import json, os, sys
from transformers import AutoTokenizer
path, messages = sys.argv[1], json.loads(sys.argv[2])
where = dict(gguf_file=os.path.basename(path)) if path.endswith('.gguf') else {}
tokenizer = AutoTokenizer.from_pretrained(os.path.dirname(path) if where else path, **where)
out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
print(json.dumps(list(out['input_ids'])))
"""


def teacher_forced(logits: Callable[..., Any], golden: list[dict[str, Any]]) -> dict[str, Any]:
    """Argmax along the golden continuation, at positions whose margin is clear."""
    longest = max(len(g["ids"]) + len(g["new"]) for g in golden)
    clear = equal = total = 0
    for g in golden:
        ids = np.zeros((1, longest), np.int32)
        sequence = g["ids"] + g["new"]
        ids[0, :len(sequence)] = sequence
        out = np.asarray(logits(ids, np.array([len(sequence)], np.int32)))[0, len(g["ids"]) - 1:len(sequence) - 1]
        for got, want, margin in zip(out.argmax(-1).tolist(), g["new"], g["margin"], strict=True):
            total += 1
            clear += margin > _MARGIN.value
            equal += margin > _MARGIN.value and got == want
    return {"positions": total, "clear": clear, "equal_where_clear": equal, "ok": equal == clear}


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


def free_run(llm: "LLM", golden: list[dict[str, Any]], *, together: bool) -> dict[str, Any]:
    """Greedy generation through the engine, compared up to each prompt's first unclear position."""
    import jaxinfer

    params = [jaxinfer.SamplingParams(temperature=0, max_tokens=len(g["new"]), ignore_eos=True) for g in golden]
    prompts = [{"prompt_token_ids": g["ids"]} for g in golden]
    outs = llm.generate(prompts, params) if together else [llm.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    compared = wrong = 0
    for g, out in zip(golden, outs, strict=True):
        for got, want, margin in zip(out.outputs[0].token_ids, g["new"], g["margin"], strict=True):
            if margin <= _MARGIN.value:
                break
            compared += 1
            wrong += got != want
    return {"batched": together, "tokens_compared": compared, "wrong": wrong, "ok": wrong == 0}


def run_golden(llm: "LLM", path: Path) -> dict[str, Any]:
    """All comparisons with one golden file."""
    from jaxinfer.engine.compiled import jit_logits

    data = json.loads(path.read_text())
    logits = jit_logits(llm.engine.model)
    ppl = perplexity(logits, data["ppl_ids"], data["window"])
    return {
        "teacher_forced": teacher_forced(logits, data["golden"]), "free_batched": free_run(llm, data["golden"], together=True),
        "free_one_by_one": free_run(llm, data["golden"], together=False),
        "perplexity": {"ours": ppl, "golden": data["ppl"], "relative": ppl / data["ppl"] - 1,
                       "ok": abs(ppl / data["ppl"] - 1) <= _PPL_TOLERANCE.value}}


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
    llm = jaxinfer.LLM(_MODEL.value, dtype=_DTYPE.value, max_model_len=2048)
    figures = run_golden(llm, Path(_GOLDEN.value)) if _GOLDEN.value else {}
    if _QUESTION.value:
        figures |= run_question(llm)
    for name, values in figures.items():
        print(f"{name}: {values}")
    report.write(f"golden-{Path(_MODEL.value).stem}-{_DTYPE.value}", {"model": Path(_MODEL.value).name, "dtype": _DTYPE.value, **figures})
    return 0 if all(v["ok"] for v in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
