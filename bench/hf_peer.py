"""The peer: Hugging Face transformers' own greedy generation, timed. Runs under an interpreter that has torch; prints one JSON line.

  PYTHON bench/hf_peer.py --model=FOLDER_OR_GGUF --dtypes=float32,bfloat16 --batch_sizes=1,8 --prompt_len=64 --max_tokens=64
Imports nothing of this project, since that interpreter need not have it.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any


def load(path: str, dtype: str) -> Any:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    if path.endswith(".gguf"):
        return AutoModelForCausalLM.from_pretrained(os.path.dirname(path), gguf_file=os.path.basename(path), dtype=kind)
    return AutoModelForCausalLM.from_pretrained(path, dtype=kind)


def run(model: Any, batch_size: int, prompt_len: int, max_tokens: int, repeats: int) -> dict:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 10000, (batch_size, prompt_len), generator=generator)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def seconds(new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, min_new_tokens=new, max_new_tokens=new, **settings)
        return time.perf_counter() - start

    seconds(2)
    ttft = statistics.median(seconds(1) for _ in range(repeats))
    whole = statistics.median(seconds(max_tokens) for _ in range(repeats))
    return {"batch": batch_size, "ttft_ms": 1e3 * ttft, "decode_tokens_per_s": batch_size * (max_tokens - 1) / (whole - ttft)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--batch_sizes", default="1,8")
    parser.add_argument("--prompt_len", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    import torch
    import transformers

    rows = []
    for dtype in args.dtypes.split(","):
        model = load(args.model, dtype).eval()
        for batch in args.batch_sizes.split(","):
            rows.append({"peer": "transformers", "dtype": dtype, **run(model, int(batch), args.prompt_len, args.max_tokens, args.repeats)})
    print(json.dumps({"rows": rows, "torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
