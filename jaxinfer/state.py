"""Every pytree that crosses the jit boundary of a step. Shapes only: no computation, no policy.

A step takes (params, DeviceState, one packed int32 buffer) and returns (StepOutput, logits, DeviceState). The buffer is unpacked on
the device into StepInput by a StepLayout, the one place that knows where each field lies.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

# Letters: T tokens of the bucket, B rows of the bucket, S slots (rows of the page table), M pages a sequence,
# L layers, P pages in the pool, Z tokens a page, K KV heads, H head dim, U page-table updates a step, D model dim, V vocabulary.

NUM_RECENT = 8       # output tokens that a slot remembers, hence the tokens of a barred word at most
NUM_BIASES = 300     # single-token biases of a slot
NUM_WORDS = 256      # barred words of several tokens of a slot
PROMPT_BIT = 1 << 30  # of SlotTables.counts


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Paged keys and values; page 0 is the null page, which padding writes to and nothing valid reads."""

    k: tuple[jax.Array, ...]  # L x [P, K, Z, H]
    v: tuple[jax.Array, ...]  # L x [P, K, Z, H]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["masks", "bias_ids", "bias_values", "word_prefixes", "word_ends", "processor_words"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TokenRules:
    """Which tokens may be sampled and what is done to their logits: of one request on the host, of all slots on the device.

    On the host (numpy) the arrays are as below; on the device each has a leading [S + 1].
    """

    masks: jax.Array | np.ndarray          # [2, ceil(V / 32)] uint32; bit v % 32 of word v // 32: v may be sampled; [1] before min_tokens;
    #                                        under a grammar [0] is written anew for each token, and [1] not looked at
    bias_ids: jax.Array | np.ndarray       # [NUM_BIASES] int32; V where unused
    bias_values: jax.Array | np.ndarray    # [NUM_BIASES] float32
    word_prefixes: jax.Array | np.ndarray  # [NUM_WORDS, NUM_RECENT - 1] int32; the tokens before a word's last, -1 in front of them
    word_ends: jax.Array | np.ndarray      # [NUM_WORDS] int32; the last token of each, V where unused
    processor_words: jax.Array | np.ndarray  # [ProcessorTable.num_words] float32; what sampling/processors.py reads


@functools.partial(jax.tree_util.register_dataclass, data_fields=["recent_tokens", "counts", "rules"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SlotTables:
    """What sampling knows of each slot. Counts and rules mean something only in slots whose request uses them."""

    recent_tokens: jax.Array  # [S + 1, NUM_RECENT] int32; the token sampled for position p, in column p % NUM_RECENT
    counts: jax.Array         # [S + 1, V] int32; times that the output holds a token, plus PROMPT_BIT where the prompt does
    rules: TokenRules


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "page_table", "slots", "hidden"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """What stays on the device between steps. Donated to every step and returned by it."""

    cache: KVCache
    page_table: jax.Array  # [S + 1, M] int32; slot S belongs to padding rows and stays zero
    slots: SlotTables
    hidden: jax.Array      # [largest T, D]; what the last mixed step gave the vocabulary head, for prompt log-probabilities


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "position", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "mask", "has_biases", "has_words", "has_processors", "wants_logprobs", "slots", "prompt_lens"],
    meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling parameters, one entry a row."""

    temperature: jax.Array         # [B] float32; 0 is greedy
    top_p: jax.Array               # [B] float32
    min_p: jax.Array               # [B] float32
    top_k: jax.Array               # [B] int32; 0 keeps all
    seed: jax.Array                # [B] uint32
    sample_index: jax.Array        # [B] int32
    position: jax.Array            # [B] int32; position of the token to be sampled
    repetition_penalty: jax.Array  # [B] float32; 1 is off
    presence_penalty: jax.Array    # [B] float32; 0 is off
    frequency_penalty: jax.Array   # [B] float32; 0 is off
    mask: jax.Array                # [B] int32; 0: every token is allowed, else 1 + the index into the slot's masks
    has_biases: jax.Array          # [B] int32 0/1
    has_words: jax.Array           # [B] int32 0/1; the slot has barred words of several tokens
    has_processors: jax.Array      # [B] int32 0/1; the slot has parameters of logit processors
    wants_logprobs: jax.Array      # [B] int32 0/1
    slots: jax.Array               # [B] int32; StepInput.slots
    prompt_lens: jax.Array         # [B] int32; StepInput.prompt_lens

    @property
    def penalises(self) -> jax.Array:
        """[B] bool."""
        return (self.repetition_penalty != 1) | (self.presence_penalty != 0) | (self.frequency_penalty != 0)

    @property
    def counts(self) -> jax.Array:
        """[B] bool; the row's tokens are counted in its slot."""
        return self.penalises | (self.has_processors > 0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "from_device", "slots", "cu_q_lens", "kv_lens", "prompt_lens", "samples", "update_slots",
                 "update_entries", "update_pages", "sampling"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's work. Rows are packed in order: row b owns tokens [cu_q_lens[b], cu_q_lens[b+1])."""

    token_ids: jax.Array       # [T] int32; 0 in padding
    from_device: jax.Array     # [B] int32 0/1; 1: the row's single token is the one that its slot sampled last
    slots: jax.Array           # [B] int32; S in padding rows
    cu_q_lens: jax.Array       # [B + 1] int32; padding rows are empty
    kv_lens: jax.Array         # [B] int32; tokens in the pages once this step has written, 0 in padding rows
    prompt_lens: jax.Array     # [B] int32; the request's prompt, which fixes Qwen v1's NTK alpha
    samples: jax.Array         # [B] int32 0/1; 1: the row's last token is followed by a sampled one
    update_slots: jax.Array    # [U] int32; page-table writes before the step; S in padding
    update_entries: jax.Array  # [U] int32
    update_pages: jax.Array    # [U] int32
    sampling: SamplingState


@functools.partial(jax.tree_util.register_dataclass, data_fields=["chosen", "ranks", "top_ids", "top"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of tokens and of the likeliest ones in their place, over the valid vocabulary."""

    chosen: jax.Array   # [B] float32; of the token itself
    ranks: jax.Array    # [B] int32; its place among all, 1 for the likeliest; equal ones count as before it
    top_ids: jax.Array  # [B, R] int32; the R likeliest, best first, the lowest id first among equals
    top: jax.Array      # [B, R] float32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tokens", "finite", "logprobs"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the host reads back, one step behind; with a leading [K] from a burst of K steps."""

    tokens: jax.Array  # [B] int32; the sampled token of rows that sample
    finite: jax.Array  # [B] bool; False: the row's logits held NaN or infinity, or its rules left no token to sample
    logprobs: TokenLogprobs | None = None
    """None where no row wants them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Where each field of StepInput lies in a bucket's packed int32 buffer; floats and uint32 travel as their bits."""

    num_tokens: int   # T
    num_rows: int     # B
    num_updates: int  # U
    null_slot: int    # S
    decode_only: bool
    """Every row has at most one token and T == B."""

    @property
    def name(self) -> str:
        """The bucket in reports and messages: rows of a decode bucket, else tokens x rows."""
        return f"{self.num_rows}" if self.decode_only else f"{self.num_tokens}x{self.num_rows}"

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, int, np.dtype]]:
        """name -> (offset, length, dtype), in int32 words."""
        rows = {name: (self.num_rows, np.int32) for name in ("from_device", "slots", "kv_lens", "prompt_lens", "samples")}
        sampling = {f"sampling.{name}": (self.num_rows, dtype) for name, dtype in (
            ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32), ("top_k", np.int32), ("seed", np.uint32),
            ("sample_index", np.int32), ("position", np.int32), ("repetition_penalty", np.float32), ("presence_penalty", np.float32),
            ("frequency_penalty", np.float32), ("mask", np.int32), ("has_biases", np.int32), ("has_words", np.int32),
            ("has_processors", np.int32), ("wants_logprobs", np.int32))}
        updates = {name: (self.num_updates, np.int32) for name in ("update_slots", "update_entries", "update_pages")}
        # What a row has comes first: row_words() of any bucket with as many rows are laid out alike.
        lengths = {**rows, **sampling, "cu_q_lens": (self.num_rows + 1, np.int32), **updates, "token_ids": (self.num_tokens, np.int32)}
        out, offset = {}, 0
        for name, (length, dtype) in lengths.items():
            out[name] = (offset, length, np.dtype(dtype))
            offset += length
        return out

    @functools.cached_property
    def num_words(self) -> int:
        """Length of the buffer."""
        offset, length, _ = list(self.fields.values())[-1]
        return offset + length

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """The named field of a host buffer, writable, in its own dtype."""
        offset, length, dtype = self.fields[name]
        return buffer[offset:offset + length].view(dtype)

    @property
    def num_row_words(self) -> int:
        """Length of the buffer's first part, which holds what each row has and depends on the number of rows alone."""
        return self.fields["cu_q_lens"][0]

    def unpack(self, buffer: jax.Array) -> StepInput:
        """The fields of a packed buffer [num_words] int32, on the device."""
        names = [f.name for f in dataclasses.fields(StepInput) if f.name != "sampling"]
        return StepInput(**{name: self._get(buffer, name) for name in names}, sampling=self.unpack_rows(buffer)[0])

    def unpack_rows(self, buffer: jax.Array) -> tuple[SamplingState, jax.Array]:
        """The rows' sampling settings and StepInput.samples, from a buffer or its first num_row_words words."""
        names = {f.name: f.name if f.name in self.fields else f"sampling.{f.name}" for f in dataclasses.fields(SamplingState)}
        return SamplingState(**{name: self._get(buffer, field) for name, field in names.items()}), self._get(buffer, "samples")

    def _get(self, buffer: jax.Array, name: str) -> jax.Array:
        offset, length, dtype = self.fields[name]
        part = jax.lax.slice(buffer, (offset,), (offset + length,))
        return part if dtype == np.int32 else jax.lax.bitcast_convert_type(part, dtype)


def kv_page_bytes(*, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * num_layers * math.prod((num_kv_heads, page_size, head_dim)) * dtype_bytes


def slot_table_bytes(*, max_num_seqs: int, vocab_size: int) -> int:
    """Bytes of SlotTables without logit processors, the padding's slot included."""
    words = 2 * -(-vocab_size // 32) + 2 * NUM_BIASES + NUM_WORDS * NUM_RECENT + 1
    return 4 * (max_num_seqs + 1) * (NUM_RECENT + vocab_size + words)
