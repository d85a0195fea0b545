"""An LLM without a model: it answers every prompt with its own words in capitals."""

from collections.abc import Iterator
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxinfer.sampling.params import SamplingParams

TIMES = RequestMetrics(ttft_s=0.0125, latency_s=0.5, num_preemptions=0)


class FakeLLM:
    """Records what it was made with and asked. 'too long' cannot be served."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[Any, SamplingParams]] = []
        self.urgency: list[tuple[int, float | None]] = []
        self.num_generate_calls = 0
        self.num_withdrawn = 0
        self.after_token: Any = lambda: None

    def generate(self, prompts: Any, params: Any = None, *, priority: Any = 0, deadline_s: Any = None, use_tqdm: bool = False,
                 on_error: str = "raise", on_output: Any = lambda index, output: None) -> list[RequestOutput]:
        assert on_error == "return"
        self.urgency += zip(priority, deadline_s, strict=True)
        self.num_generate_calls += 1
        outputs = []
        for prompt, p in zip(prompts, params, strict=True):
            self.calls.append((prompt, p))
            refused = answer_to(prompt) == "TOO LONG"
            outputs.append(output(prompt, "" if refused else answer_to(prompt), n=p.n, error="prompt is too long" if refused else None))
        for index in reversed(range(len(outputs))):  # they may end in any order
            on_output(index, outputs[index])
        return outputs

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0,
               deadline_s: float | None = None) -> Iterator[RequestOutput]:
        assert params is not None
        self.urgency.append((priority, deadline_s))
        self.calls.append((prompt, params))
        text = answer_to(prompt)
        if text == "TOO LONG":
            raise RequestError("prompt is too long")
        done = False
        try:
            for end in range(1, len(text) + 1):
                yield output(prompt, text[:end], finished=end == len(text))
                self.after_token()
            done = True
        finally:
            self.num_withdrawn += not done

    def metrics(self) -> dict[str, Any]:
        return {"ttft_ms": 12.3, "decode_tokens_per_s": 45.67, "num_prompt_tokens": 5, "num_output_tokens": 7,
                "memory_bytes": 2_500_000_000, "roofline_share": None, "startup_s": 1.5, "num_compiles_after_warmup": 0}


def answer_to(prompt: Any) -> str:
    if isinstance(prompt, list):
        prompt = {"messages": prompt}
    if "messages" in prompt:
        return prompt["messages"][-1]["content"].upper()
    return prompt["prompt"].upper() if "prompt" in prompt else str(prompt["prompt_token_ids"])


def output(prompt: Any, text: str, *, n: int = 1, finished: bool = True, error: str | None = None) -> RequestOutput:
    reason = FinishReason.STOP if finished else None
    completions = tuple(CompletionOutput(index=i, text=text, token_ids=(1, 2), finish_reason=reason) for i in range(n))
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=(7, 8, 9), outputs=() if error else completions, num_cached_tokens=0,
                         metrics=TIMES, error=error)
