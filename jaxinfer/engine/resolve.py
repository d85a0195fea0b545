"""EngineConfig + model + hardware -> ResolvedConfig: every derived number is decided here, once, and can be printed."""

import dataclasses

import numpy as np

from jaxinfer.config import CPU_MAX_NUM_SEQS, GPU_SCHEDULER_STEPS, EngineConfig
from jaxinfer.engine.forced import forced_kernels
from jaxinfer.engine.hardware import Hardware
from jaxinfer.engine.layer_kernels import attention_choice, norm_choice, rotary_choice
from jaxinfer.engine.matmuls import check_forced_matmuls, dequantised_bytes, favours_single_rows
from jaxinfer.engine.page_moves import MAX_CALLS_AHEAD, NUM_PAGES_MOVED
from jaxinfer.errors import CapacityError, ConfigError
from jaxinfer.layers.forced import ForcedKernels
from jaxinfer.models.config import ModelConfig
from jaxinfer.scheduler.policies import find_policy
from jaxinfer.state import StepLayout, kv_page_bytes, slot_table_bytes

DEFAULT_PAGE_SIZE = 64
"""Tokens of a page where page_size leaves it open: the largest of which two are in flight in 64 KiB at head dim 128, so that two blocks of
decode share an sm_80 core; with pages of 128 a block takes 137217 bytes of shared memory. Smaller pages cut a step's keys into more pieces:
the 128 of wgmma are two pages of 64 or eight of 16, and mosaic's prefill at head dim 64 takes 64, 32 or 16 keys a step, as a page has (all in
pallas_kernels/ragged_paged_attention/config.py). The price is the unused end of each sequence's last page: 2.6 % of the memory held at 64,
0.6 % at 16 (bench/results/memory.json).

On an H200 (2026-12-01, bench/results/kernels-pages-nvidia-h200.json), us with pages of 16, 32, 64 and 128, 28/4 heads: decode of 1 row of
640 keys 9.1, 6.2, 5.3, 4.8; of 8 rows 11.5, 9.8, 9.7, 11.0; of 32 21.5, 17.9, 17.6, 20.0; of 128 45.8, 50.3, 46.1, 47.9; of 32 rows of 4096
72.5, 80.6, 68.6, 70.4; of 1 row of 32768 28.5, 23.7, 23.2, 24.5. Where there are more KV heads, 128 was the fastest: 32 rows of 4096
took 136, 153, 140, 126 with 64/8 heads, of which 128 alone was not split, and 495, 527, 527, 475 with 32/32; of 64, not split there any
more and on another H200, 124 and 470 (kernels-attention-nvidia-h200.json). Prompts of 32/32 take the same on
wgmma within 4 %; on mosaic 8192 tokens take 3012, 2139, 2184, 2161."""
_MIXED_ROWS = 8            # rows of the small prefill buckets; larger mixes take max_num_seqs rows
_LEAST_DECODE_ROWS = {"cpu": 1, "gpu": 8}  # an H200 takes as long for 1 row of Qwen2-7B's shape as for 8 (4.27 ms): one executable for all,
                                            # but for products that have a kernel of their own for a single row
MAX_BURST_ROWS = 128       # beyond, steps are long beside what a launch leaves idle (1 ms of 7 at 128 rows in int4), and each loop is a compile
_CPU_KV_SHARE = 0.125      # of RAM, at most
_CPU_MAX_MODEL_LEN = 4096  # default cap on a CPU, where attention over more takes seconds a token
_DEFAULTS = {              # platform -> (max_num_seqs, max_num_batched_tokens, token buckets)
    "cpu": (CPU_MAX_NUM_SEQS, 256, (16, 64, 256)),
    "gpu": (256, 8192, (128, 512, 2048, 8192)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, by use."""

    weight_bytes: int
    kv_bytes: int
    step_bytes: int
    """The slots' sampling tables, an estimate of the largest step's activations and logits, and pages on their way to the host and back."""
    budget_bytes: int
    """What the settings allow in all."""
    page_bytes: int
    """One page over all layers, keys and values."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.step_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """What the engine runs with."""

    engine: EngineConfig
    model: ModelConfig
    hardware: Hardware
    dtype: np.dtype
    kv_dtype: np.dtype
    num_valid_tokens: int
    """Ids at or above this are padding of the vocabulary."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_scheduler_steps: int
    page_size: int
    num_pages: int
    num_host_pages: int
    """Of swap_space_bytes: pages for what preempted requests have computed."""
    layouts: tuple[StepLayout, ...]
    """The closed set of buckets, smallest first."""
    memory: MemoryPlan

    @property
    def num_pages_per_seq(self) -> int:
        """Width M of the page table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def part(self) -> ModelConfig:
        """What one device computes of the model."""
        return self.model.part(self.engine.tensor_parallel_size)

    @property
    def enforce_eager(self) -> bool:
        return self.engine.enforce_eager

    @property
    def burst_layouts(self) -> tuple[StepLayout, ...]:
        """The buckets whose bursts of num_scheduler_steps steps are one executable, a loop on the device; elsewhere a burst is as many
        launches. No mixed one is among them, hence none where deterministic: there every step runs by the same executable."""
        if self.num_scheduler_steps == 1 or self.enforce_eager:
            return ()
        return tuple(x for x in self.layouts if x.decode_only and x.num_rows <= MAX_BURST_ROWS)

    @property
    def forced(self) -> ForcedKernels:
        """The implementations that the settings name."""
        return forced_kernels(self.engine)


def resolve(engine: EngineConfig, model: ModelConfig, hardware: Hardware, *, checkpoint_dtype: str, num_valid_tokens: int,
            weight_bytes: int) -> ResolvedConfig:
    """Decides every setting that the user left open and checks the rest against model and hardware.

    Args:
      checkpoint_dtype: dtype of the converted weights, taken where the settings say auto.
      num_valid_tokens: ids that the tokenizer knows; the rest of the vocabulary is padding.
      weight_bytes: bytes of the weights, or of each device's part of them, in the dtype that they will have.

    Raises:
      ConfigError: a setting contradicts the model or another setting, or names what there is not.
      CapacityError: weights and at least one full-length sequence do not fit, or a pool of the size asked for does not.
    """
    find_policy(engine.scheduling_policy)
    if engine.enforce_eager and engine.tensor_parallel_size > 1:
        raise ConfigError(f"enforce_eager = True over {engine.tensor_parallel_size} devices: what several devices run together is a compiled "
                          "program. Debug on one device, or leave enforce_eager out.")
    dtype = np_dtype(checkpoint_dtype if engine.dtype == "auto" else engine.dtype)
    kv_dtype = dtype if engine.kv_dtype == "auto" else np_dtype(engine.kv_dtype)
    page_size = engine.page_size or DEFAULT_PAGE_SIZE
    max_model_len = _max_model_len(engine, model, hardware)
    seqs, batched, token_buckets = _DEFAULTS[hardware.platform]
    max_num_seqs = engine.max_num_seqs or seqs
    if engine.max_num_batched_tokens is None and engine.token_buckets:
        batched = engine.token_buckets[-1]
    max_num_batched_tokens = engine.max_num_batched_tokens or max(batched, max_num_seqs)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(f"max_num_batched_tokens = {max_num_batched_tokens} is less than max_num_seqs = {max_num_seqs}: every running "
                          f"sequence decodes one token a step. Raise the first to at least {max_num_seqs} or lower the second.")
    _check_buckets(engine, max_num_seqs, max_num_batched_tokens)
    forced = forced_kernels(engine)
    favours_single = favours_single_rows(model, dtype=dtype, hardware=hardware, forced=forced)
    decode_rows = _decode_rows(max_num_seqs, hardware.platform, favours_single=favours_single)
    layouts = _layouts(engine, token_buckets, max_num_seqs, max_num_batched_tokens, page_size, decode_rows)
    part = model.part(engine.tensor_parallel_size)
    step_bytes = _step_bytes(part, layouts, dtype, model.vocab_size) + slot_table_bytes(max_num_seqs=max_num_seqs, vocab_size=model.vocab_size)
    step_bytes += dequantised_bytes(part, layouts, dtype=dtype, hardware=hardware, forced=forced)
    page_bytes = kv_page_bytes(num_layers=model.num_layers, num_kv_heads=part.num_kv_heads, page_size=page_size,
                               head_dim=model.head_dim, dtype_bytes=kv_dtype.itemsize)
    num_host_pages = _num_host_pages(engine, page_bytes)
    if num_host_pages:
        step_bytes += 2 * MAX_CALLS_AHEAD * NUM_PAGES_MOVED * page_bytes * engine.tensor_parallel_size  # every device holds them whole
    pages_per_seq = -(-max_model_len // page_size)
    num_pages, budget = _num_pages(engine, hardware, weight_bytes=weight_bytes, step_bytes=step_bytes, page_bytes=page_bytes,
                                   pages_wanted=max_num_seqs * pages_per_seq + 1)
    memory = MemoryPlan(weight_bytes=weight_bytes, kv_bytes=num_pages * page_bytes, step_bytes=step_bytes, budget_bytes=budget,
                        page_bytes=page_bytes)
    if num_pages - 1 < pages_per_seq:
        raise CapacityError(_too_few_pages(engine, memory, num_pages, max_model_len, page_size))
    if memory.total_bytes > hardware.memory_bytes:
        raise CapacityError(
            f"{weight_bytes / 1e9:.2f} GB of weights, {step_bytes / 1e9:.2f} GB for a step and a KV pool of {num_pages} pages "
            f"({memory.kv_bytes / 1e9:.2f} GB) take {memory.total_bytes / 1e9:.2f} GB, more than the {hardware.memory_bytes / 1e9:.2f} GB of "
            f"{hardware.name}: lower num_pages or kv_cache_memory_bytes, or leave both out.")
    resolved = ResolvedConfig(
        engine=engine, model=model, hardware=hardware, dtype=dtype, kv_dtype=kv_dtype, num_valid_tokens=num_valid_tokens,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        num_scheduler_steps=engine.num_scheduler_steps or (1 if hardware.platform == "cpu" else GPU_SCHEDULER_STEPS),
        page_size=page_size, num_pages=num_pages, num_host_pages=num_host_pages, layouts=layouts, memory=memory)
    _check_forced(resolved)
    return resolved


def _check_forced(resolved: ResolvedConfig) -> None:
    """Refuses implementations named in the settings that cannot do what the engine would ask them for. Asks nothing where none is named."""
    forced = resolved.forced
    for name, choice in ((forced.attention, attention_choice), (forced.rotary, rotary_choice), (forced.norm, norm_choice)):
        if name is not None:
            for layout in resolved.layouts:
                choice(resolved, layout)
    if forced.matmul is not None:
        check_forced_matmuls(resolved)


def _check_buckets(engine: EngineConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Refuses buckets that no step can fill."""
    for name, buckets, limit_name, limit in (("batch_buckets", engine.batch_buckets, "max_num_seqs", max_num_seqs),
                                             ("token_buckets", engine.token_buckets, "max_num_batched_tokens", max_num_batched_tokens)):
        if buckets and buckets[-1] > limit:
            raise ConfigError(f"{name} holds {buckets[-1]}, more than {limit_name} = {limit}, so that no step fills it: leave it out or "
                              f"raise {limit_name}.")


def _too_few_pages(engine: EngineConfig, memory: MemoryPlan, num_pages: int, max_model_len: int, page_size: int) -> str:
    """Why the pool does not hold one sequence of full length, and what helps: the settings that made it so small."""
    pages_per_seq = -(-max_model_len // page_size)
    need, shortest = (pages_per_seq + 1) * memory.page_bytes, (num_pages - 1) * page_size
    remedies = [f"lower max_model_len to {shortest}"] if shortest >= 2 else []
    if engine.num_pages is not None:
        remedies.append(f"raise num_pages to at least {pages_per_seq + 1}")
    elif engine.kv_cache_memory_bytes is not None:
        remedies.append(f"raise kv_cache_memory_bytes to at least {need}")
    else:
        remedies += ["lower max_num_seqs or max_num_batched_tokens", "raise gpu_memory_utilization or set num_pages"]
    return (f"the KV pool holds {max(num_pages - 1, 0)} pages ({memory.kv_bytes / 1e9:.2f} GB) beside {memory.weight_bytes / 1e9:.2f} GB of "
            f"weights and {memory.step_bytes / 1e9:.2f} GB for a step, but one sequence of max_model_len = {max_model_len} needs "
            f"{pages_per_seq} pages ({need / 1e9:.2f} GB): {', or '.join(remedies)}.")


def running_dtype(setting: str, stored: str) -> str:
    """The dtype that weights run in. auto is the stored one, but bfloat16 for float16: activations of many models overflow float16."""
    if setting != "auto":
        return setting
    return "bfloat16" if stored == "float16" else stored


def np_dtype(name: str) -> np.dtype:
    """numpy's dtype of a name such as bfloat16."""
    import ml_dtypes  # registers bfloat16 with numpy

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _max_model_len(engine: EngineConfig, model: ModelConfig, hardware: Hardware) -> int:
    trained = model.max_position_embeddings
    if engine.max_model_len is None:
        return min(trained, _CPU_MAX_MODEL_LEN) if hardware.platform == "cpu" else trained
    if engine.max_model_len > trained:
        raise ConfigError(f"max_model_len = {engine.max_model_len}: {model.architecture} was trained for {trained} positions: use at most "
                          f"{trained}.")
    return engine.max_model_len


def _layouts(engine: EngineConfig, token_buckets: tuple[int, ...], max_num_seqs: int, max_num_batched_tokens: int,
             page_size: int, decode_rows: tuple[int, ...]) -> tuple[StepLayout, ...]:
    """Decode buckets (T == B, `decode_rows` where none are asked for) and mixed buckets (T tokens, few or all rows); one mixed bucket when
    deterministic."""
    def mixed(num_tokens: int, num_rows: int) -> StepLayout:
        rows = min(num_tokens, num_rows)
        return StepLayout(num_tokens=num_tokens, num_rows=rows, num_updates=num_tokens // page_size + 2 * rows, null_slot=max_num_seqs,
                          decode_only=False)

    def decode(rows: int) -> StepLayout:
        return StepLayout(num_tokens=rows, num_rows=rows, num_updates=rows, null_slot=max_num_seqs, decode_only=True)

    if engine.deterministic:
        return (mixed(max_num_batched_tokens, max_num_seqs),)
    tokens = {t for t in engine.token_buckets or token_buckets if t < max_num_batched_tokens} | {max_num_batched_tokens}
    if engine.batch_buckets:
        decode_rows = (*(r for r in engine.batch_buckets if r < max_num_seqs), max_num_seqs)
    layouts = {decode(r) for r in decode_rows}
    for t in tokens:
        layouts |= {mixed(t, min(_MIXED_ROWS, max_num_seqs)), mixed(t, max_num_seqs)}
    return tuple(sorted(layouts, key=lambda x: (x.num_tokens, not x.decode_only, x.num_rows)))


def _decode_rows(max_num_seqs: int, platform: str, *, favours_single: bool) -> tuple[int, ...]:
    """Powers of two, and the most there can be."""
    if favours_single and max_num_seqs == 1:
        return (1,)
    least = _LEAST_DECODE_ROWS[platform]
    largest = max(max_num_seqs, least)
    rows = {2**i for i in range(largest.bit_length()) if least <= 2**i < largest} | {largest}
    return tuple(sorted(rows | {1} if favours_single else rows))


def _step_bytes(model: ModelConfig, layouts: tuple[StepLayout, ...], dtype: np.dtype, vocab_size: int) -> int:
    """Estimate of a step's buffers: the widest activations of every token, the kept hidden rows, and three float32 copies of the logits,
    which every device holds whole."""
    def one(layout: StepLayout) -> int:
        heads = model.num_heads + 2 * model.num_kv_heads
        width = 5 * model.dim + 3 * model.mlp_dim + 2 * heads * model.head_dim
        return layout.num_tokens * width * dtype.itemsize + 3 * layout.num_rows * vocab_size * 4

    return max(one(layout) for layout in layouts)


def _num_host_pages(engine: EngineConfig, page_bytes: int) -> int:
    """Pages that swap_space_bytes holds, each with the parts of all devices."""
    whole = page_bytes * engine.tensor_parallel_size
    if 0 < engine.swap_space_bytes < whole:
        raise ConfigError(f"swap_space_bytes = {engine.swap_space_bytes}: less than one page of {whole} bytes; raise it, or leave it at 0.")
    return engine.swap_space_bytes // whole


def _num_pages(engine: EngineConfig, hardware: Hardware, *, weight_bytes: int, step_bytes: int, page_bytes: int,
               pages_wanted: int) -> tuple[int, int]:
    """(pages of the pool, byte budget): as set, else what is left of the budget; no more than all sequences at full length need."""
    budget = int(hardware.memory_bytes * engine.gpu_memory_utilization)
    if engine.num_pages is not None:
        return engine.num_pages, budget
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes // page_bytes, budget
    room = budget - weight_bytes - step_bytes
    if hardware.platform == "cpu":
        room = min(room, int(hardware.memory_bytes * _CPU_KV_SHARE))
    return max(min(room // page_bytes, pages_wanted), 0), budget
