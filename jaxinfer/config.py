"""Engine settings as the user gives them: frozen, checked, nothing derived (engine/resolve.py derives). Never imports jax."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
PAGE_SIZES = (16, 32, 64, 128)
CPU_MAX_NUM_SEQS = 8
"""max_num_seqs on a CPU, where none is given."""
GPU_SCHEDULER_STEPS, SERVING_SCHEDULER_STEPS = 8, 1
"""num_scheduler_steps where none is given: on a GPU, and in AsyncLLM, where newcomers would wait for bursts, anywhere. On a CPU it is 1,
too: a step of any real model takes far longer than its launch, and each loop is one more executable to compile."""
VLLM_SPELLINGS = {"block_size": "page_size", "num_gpu_blocks_override": "num_pages", "kv_cache_dtype": "kv_dtype"}


def setting(default: Any, help: str) -> Any:
    """A config field with the sentence that documents it and serves as its command-line help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. None means: chosen by engine/resolve.py from the model and the hardware."""

    model: str = setting("", "Converted checkpoint folder, Hugging Face folder or .gguf file.")
    dtype: str = setting("auto", "Weights and activations: auto (the checkpoint's, but bfloat16 for float16), bfloat16, float16 or float32.")
    max_model_len: int | None = setting(None, "Prompt plus output tokens of one sequence at most; default: what the model was trained for.")
    seed: int = setting(0, "Seed for requests that bring none.")
    enforce_eager: bool = setting(False, "Run steps without jit, for debugging.")
    deterministic: bool = setting(
        False, "Run every step at one token bucket, so that a request's bits do not depend on how it is served (engine/engine.py says "
        "what is promised, and what without it).")
    async_scheduling: bool = setting(True, "Dispatch a step before the tokens of the one before it are read.")

    num_scheduler_steps: int | None = setting(
        None, "Decode steps that are dispatched in a row before the host looks at their tokens, while no request waits: one launch for all of "
        "them where the rows are greedy and 128 at most. The price: tokens come as many at a time, a new request waits for the burst that "
        "runs and the one behind it, and up to twice as many steps are computed past a stop. 1 is off; default: 8 on a GPU, 1 on a CPU and "
        "in AsyncLLM.")

    page_size: int | None = setting(None, "Tokens in one KV-cache page: 16, 32, 64 or 128.")
    num_pages: int | None = setting(None, "Pages in the KV pool, null page included; overrides the memory settings.")
    kv_cache_memory_bytes: int | None = setting(None, "Bytes for the KV pool; overrides gpu_memory_utilization.")
    gpu_memory_utilization: float = setting(0.9, "Share of the device's memory that weights, KV pool and step buffers may take.")
    kv_dtype: str = setting("auto", "KV cache: auto (as dtype), bfloat16, float16 or float32.")
    enable_prefix_caching: bool = setting(True, "Reuse the KV pages of equal prompt prefixes.")

    max_num_seqs: int | None = setting(
        None, "Sequences that run together at most; default: 256 on a GPU, 8 on a CPU (the generate command: no more than its prompts).")
    max_num_batched_tokens: int | None = setting(None, "Tokens in one step at most; longer prompts are prefilled in chunks.")
    scheduling_policy: str = setting(
        "fcfs", "Order in which waiting requests are admitted: fcfs, priority, preemptive, shortest_prompt, longest_cached_prefix or "
        "a registered one.")
    length_buckets: tuple[int, ...] | None = setting(
        (64, 128, 256, 512, 1024, 2048, 4096, 8192),
        "Longest prompts of the queues in which requests wait, so that short ones do not wait behind long ones; none: one queue.")
    length_bucket_caps: tuple[int, ...] | None = setting(
        None, "Requests of each length bucket in prefill at once, one number an edge; default: enough to fill a step.")
    long_prefill_share: float = setting(
        0.5, "Part of a step's prefill tokens that the oldest prompt may take while shorter ones wait.")
    preemption_grace_tokens: int = setting(
        64, "Tokens for which a preempted request must find room beyond its own, and for which it is then spared.")
    swap_space_bytes: int = setting(
        0, "Bytes of host memory, such as 16000000000, for the KV pages of preempted requests, which go there and come back where that takes "
        "less time than to compute them again (measured at start); 0: they are always computed again.")
    token_buckets: tuple[int, ...] | None = setting(None, "Token counts that prefill steps are padded to.")
    batch_buckets: tuple[int, ...] | None = setting(None, "Row counts that decode steps are padded to.")

    max_logprobs: int = setting(20, "Likeliest tokens for which a request can ask log-probabilities, at most.")

    dump_steps_dir: str | None = setting(
        None, "Folder for the inputs of steps whose output is not finite, at most 16 of them, for jaxinfer.replay; steps then run one "
        "after the other.")
    dump_step_numbers: tuple[int, ...] | None = setting(
        None, "Steps to write into that folder as well, whatever their output, counted from 0 at the start of the engine.")

    compilation_cache_dir: str | None = setting(
        "~/.cache/jaxinfer/xla", "Folder of jax's persistent compilation cache, where the process has set none; None leaves it off.")

    tensor_parallel_size: int = setting(
        1, "Devices that share every layer: each holds its heads, its part of the MLP and of the vocabulary, and their KV pages. Must divide "
        "the model's KV heads.")
    attention_implementation: str = setting("auto", "Paged attention: auto, or the name of one implementation, which then never falls back.")
    rotary_implementation: str = setting("auto", "Rotation and the write of keys and values: as attention_implementation.")
    norm_implementation: str = setting("auto", "Norms that add the residual first: as attention_implementation.")
    matmul_implementation: str = setting("auto", "Products with quantised weights: as attention_implementation.")

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("dtype", "kv_dtype"):
            _require(getattr(self, name) in DTYPES, name, getattr(self, name), f"one of {', '.join(DTYPES)}")
        _require(self.page_size is None or self.page_size in PAGE_SIZES, "page_size", self.page_size, f"one of {PAGE_SIZES}")
        for name, least in (("max_model_len", 2), ("num_pages", 2), ("kv_cache_memory_bytes", 1), ("max_num_seqs", 1),
                            ("max_num_batched_tokens", 1), ("tensor_parallel_size", 1), ("preemption_grace_tokens", 0),
                            ("swap_space_bytes", 0)):
            value = getattr(self, name)
            _require(value is None or value >= least, name, value, f"an integer >= {least}")
        _require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        _require(self.num_scheduler_steps is None or 1 <= self.num_scheduler_steps <= 32, "num_scheduler_steps", self.num_scheduler_steps,
                 "an integer in [1, 32]")
        _require(1 <= self.max_logprobs <= 128, "max_logprobs", self.max_logprobs, "an integer in [1, 128]")
        _require(0 < self.long_prefill_share <= 1, "long_prefill_share", self.long_prefill_share, "in (0, 1]")
        edges, caps = self.length_buckets or (), self.length_bucket_caps
        _require(list(edges) == sorted(set(edges)) and min(edges, default=1) >= 1, "length_buckets", edges,
                 "a strictly increasing list of integers >= 1, or empty")
        _require(caps is None or (len(caps) == len(edges) and min(caps, default=1) >= 1), "length_bucket_caps", caps,
                 f"one integer >= 1 for each of the {len(edges)} length_buckets")
        _require(min(self.dump_step_numbers or (0,)) >= 0, "dump_step_numbers", self.dump_step_numbers, "integers >= 0")
        if self.dump_step_numbers is not None and self.dump_steps_dir is None:
            raise ConfigError(f"dump_step_numbers = {self.dump_step_numbers} and no dump_steps_dir: name the folder (--dump_step=DIR).")
        for name in ("token_buckets", "batch_buckets"):
            value = getattr(self, name)
            _require(value is None or (len(value) > 0 and list(value) == sorted(set(value)) and value[0] >= 1), name, value,
                     "a strictly increasing list of integers >= 1")
        for name in ("token_buckets", "batch_buckets"):
            if self.deterministic and getattr(self, name) is not None:
                raise ConfigError(f"deterministic = True and {name} = {getattr(self, name)}: deterministic runs every step at one bucket of "
                                  f"max_num_batched_tokens, so {name} would mean nothing: leave out one of the two.")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(f"num_pages = {self.num_pages} and kv_cache_memory_bytes = {self.kv_cache_memory_bytes} both set the "
                              "size of the KV pool: give one of them.")

    def _check_types(self) -> None:
        """Every value has its field's type; a number is no bool and a whole number no float."""
        for name, hint in typing.get_type_hints(type(self)).items():
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            value = getattr(self, name)
            fits, form = zip(*(_FORMS[kind] for kind in kinds), strict=True)
            _require(any(fit(value) for fit in fits), name, value, " or ".join(form))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "EngineConfig":
        """A config from keyword settings; vLLM's spellings are accepted, unknown names refused.

        Raises:
          ConfigError: an unknown name, a setting given under two spellings, or a value out of range.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for spelled, value in settings.items():
            name = VLLM_SPELLINGS.get(spelled, spelled)
            if name not in known:
                near = difflib.get_close_matches(spelled, [*known, *VLLM_SPELLINGS], n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
                raise ConfigError(f"unknown engine setting {spelled!r}.{hint}")
            if name in values:
                raise ConfigError(f"setting {name!r} was given twice, once under another spelling: give it once.")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FORMS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (_is_int, "an integer"),
    float: (lambda value: _is_int(value) or isinstance(value, float), "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    tuple[int, ...]: (lambda value: isinstance(value, tuple) and all(map(_is_int, value)), "a list of integers"),
    type(None): (lambda value: value is None, "None"),
}
"""A field's type -> its check, and its name in a message."""


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {limit}.")
