"""torch's kernels, timed in a process of their own, since torch and jax may bring different CUDA libraries.

A call is timed as many launches of it in one CUDA graph over rotating operands; what passes between kernels inside a graph counts. As a
program (`python -m bench.kernels.torch_peers`) it reads one JSON case a line and answers each by {"seconds": ...} or {"error": ...}.
"""

import atexit
import contextlib
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from bench.kernels.rows import LeftOut, Row

CALLS = 16
REPLAYS = 4
ANSWER_S = 120  # a child that says nothing for so long is ended
CACHE_BYTES = 128 * 2**20
SDPA_BACKENDS = {"torch flash (dense)": "FLASH_ATTENTION", "torch cudnn (dense)": "CUDNN_ATTENTION"}


class TorchError(RuntimeError):
    """torch could not do a case; says what it said."""


class Child:
    """The other process, started at the first question."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "bench.kernels.torch_peers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        atexit.register(self._process.kill)

    def ask(self, case: dict[str, Any]) -> tuple[float, str]:
        """Seconds a call and how they were taken.

        Raises:
          TorchError: torch refused the case, or the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(ANSWER_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            raise TorchError(f"torch's process ended (code {self._process.poll()}) or was ended after {ANSWER_S} s without an answer")
        figures = json.loads(answer)
        if "error" in figures:
            raise TorchError(figures["error"])
        return figures["seconds"], "cuda graph"


@functools.cache
def child() -> Child:
    """The one child of this process."""
    return Child()


def peers(base: Callable[..., Row], op: str, shape: str, cases: dict[str, dict[str, Any]]) -> Iterator[Row | LeftOut]:
    """Rows that torch times, one a case; left out where torch is not installed."""
    for name, case in cases.items():
        if find_spec("torch") is None:
            yield LeftOut(op=op, shape=shape, implementation=name, reason="torch is not installed")
        else:
            yield base(implementation=name, function=_not_here, make=_not_here, is_peer=True, seconds=lambda case=case: child().ask(case))


def _not_here(*_: Any) -> Any:
    raise AssertionError("torch's rows are timed in torch's process")


def sdpa_cases(batch: int, num_queries: int, num_keys: int, heads: int, kv_heads: int, head_dim: int, scale: float, *,
               causal: bool) -> dict[str, dict[str, Any]]:
    """Name -> case of dense attention; causal asks for as many queries as keys."""
    return {name: {"what": "sdpa", "backend": backend, "q": [batch, heads, num_queries, head_dim], "kv": [batch, kv_heads, num_keys, head_dim],
                   "causal": causal, "scale": scale} for name, backend in SDPA_BACKENDS.items()}


def norm_case(num_tokens: int, dim: int, eps: float) -> dict[str, dict[str, Any]]:
    """torch.nn.functional.rms_norm, which knows no residual."""
    return {"torch rms_norm": {"what": "rms_norm", "x": [num_tokens, dim], "eps": eps}}


def int4_cases(num_tokens: int, k: int, n: int, group_size: int) -> dict[str, dict[str, Any]]:
    """A product with weights of 4 bits, and with the same weights in bfloat16."""
    shapes = {"x": [num_tokens, k], "n": n, "group_size": group_size}
    return {"torch int4pack": {"what": "int4", **shapes}, "torch bfloat16": {"what": "dense", **shapes}}


def seconds(case: dict[str, Any]) -> float:
    """Device time of one call of a case."""
    import torch  # type: ignore[import-not-found]

    call, shapes = {"sdpa": _sdpa, "rms_norm": _rms_norm, "int4": _int4, "dense": _dense}[case["what"]](case)
    sets = max(1, min(CALLS, math.ceil(CACHE_BYTES / sum(2 * math.prod(s) for s in shapes)) + 1))
    operands = [[torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes] for _ in range(sets)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up off the main stream, as capture demands
        for arrays in operands[:3] * 3:
            call(*arrays)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(*operands[i % sets])
    graph.replay()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS / REPLAYS)
    return statistics.median(times)


def _sdpa(case: dict[str, Any]) -> tuple[Callable[..., Any], list[list[int]]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found]

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel([getattr(SDPBackend, case["backend"])]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case["causal"], scale=case["scale"], enable_gqa=case["q"][1] != case["kv"][1])

    return call, [case["q"], case["kv"], case["kv"]]


def _rms_norm(case: dict[str, Any]) -> tuple[Callable[..., Any], list[list[int]]]:
    import torch

    dim = case["x"][1]
    return lambda x, weight: torch.nn.functional.rms_norm(x, (dim,), weight, case["eps"]), [case["x"], [dim]]


def _dense(case: dict[str, Any]) -> tuple[Callable[..., Any], list[list[int]]]:
    import torch

    return torch.matmul, [case["x"], [case["x"][1], case["n"]]]


def _int4(case: dict[str, Any]) -> tuple[Callable[..., Any], list[list[int]]]:
    import torch

    k, n, group_size = case["x"][1], case["n"], case["group_size"]
    sets = max(1, min(CALLS, math.ceil(CACHE_BYTES / (k * n / 2)) + 1))
    weights = itertools.cycle([torch.ops.aten._convert_weight_to_int4pack(
        torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8), 8) for _ in range(sets)])
    # Codes are no random normals, so they rotate here; the scales and zero points rotate with x.
    return (lambda x, scales: torch.ops.aten._weight_int4pack_mm(x, next(weights), group_size, scales)), [case["x"], [k // group_size, n, 2]]


def main() -> None:
    """Answers cases until there are no more."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever torch prints
        for text in sys.stdin:
            try:
                answer: dict[str, Any] = {"seconds": seconds(json.loads(text))}
            except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError) as error:
                answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
