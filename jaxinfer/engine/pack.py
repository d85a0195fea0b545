"""Turns a SchedulePlan into the packed host buffer of one bucket: all padding is here. numpy only, no jax."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.prompt_scores import wants_scores
from jaxinfer.request import Request
from jaxinfer.scheduler.plan import SchedulePlan
from jaxinfer.state import StepLayout


def pick_layout(layouts: Sequence[StepLayout], plan: SchedulePlan) -> StepLayout:
    """The smallest bucket that holds the plan: a decode bucket where every row is one token, else a mixed one.

    A plan with a prompt to be scored takes a mixed one, which keeps its hidden states.

    Args:
      layouts: the closed set of buckets, in increasing order of (num_tokens, num_rows).
    """
    decodes = plan.is_decode_only and not (plan.num_prefill_tokens and any(map(wants_scores, plan.rows)))
    for layout in layouts:
        fits = len(plan.rows) <= layout.num_rows and plan.num_tokens <= layout.num_tokens
        if fits and (decodes or not layout.decode_only):
            return layout
    raise AssertionError(f"no bucket holds {len(plan.rows)} rows of {plan.num_tokens} tokens: the scheduler's limits exceed {layouts[-1]}")


class SlotWords:
    """What a row's words say of its request, which is the same in every step of its stay in a slot: made once, then copied.

    Args:
      num_slots: S.
    """

    FIELDS = ("prompt_lens", *(f"sampling.{name}" for name in (
        "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "seed", "sample_index",
        "mask", "has_biases", "has_words", "has_processors", "wants_logprobs")))

    def __init__(self, num_slots: int) -> None:
        self._words = np.zeros((num_slots, len(self.FIELDS)), np.int32)
        self._owners: list[Request | None] = [None] * num_slots

    def of(self, slots: Sequence[int], requests: Sequence[Request]) -> np.ndarray:
        """[len(FIELDS), len(slots)] int32 of requests in their slots; floats and uint32 as their bits."""
        owners = self._owners
        for slot, request in zip(slots, requests, strict=True):
            if owners[slot] is not request:
                owners[slot], self._words[slot] = request, _request_words(request)
        return self._words[np.asarray(slots)].T


def _request_words(request: Request) -> list[int]:
    """In the order of SlotWords.FIELDS."""
    p = request.params
    floats = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    barred = p.allowed_token_ids is not None or bool(p.bad_words) or request.grammar is not None
    flags = (barred, bool(p.biases), any(len(ids) > 1 for ids in request.bad_word_ids), bool(p.logits_processors), p.logprobs is not None)
    return [len(request.prompt_token_ids), *np.asarray(floats, np.float32).view(np.int32).tolist(), p.top_k,
            int(np.uint32(request.seed).view(np.int32)), request.sample_index, *map(int, flags)]


def pack(plan: SchedulePlan, layout: StepLayout, updates: Sequence[tuple[int, int, int]], words: SlotWords | None = None) -> np.ndarray:
    """One step's input as int32 words.

    Args:
      plan: rows in order; row b's tokens are packed at [cu_q_lens[b], cu_q_lens[b+1]).
      layout: a bucket that holds the plan; rows and tokens past it are padding (slot S, empty, greedy).
      updates: page-table writes (slot, entry, page), at most layout.num_updates.
      words: kept from step to step by whoever packs many; None makes them anew.

    Returns:
      [layout.num_words] int32, for StepLayout.unpack.
    """
    n = len(plan.rows)
    requests, slots, starts, lengths, token_ids, from_device, samples = zip(*plan.rows, strict=True)
    buffer = np.zeros(layout.num_words, np.int32)
    layout.view(buffer, "sampling.top_p")[n:] = 1.0
    layout.view(buffer, "sampling.repetition_penalty")[n:] = 1.0
    by_field = buffer[:layout.num_row_words].reshape(-1, layout.num_rows)
    numbers = [layout.fields[name][0] // layout.num_rows for name in SlotWords.FIELDS]
    by_field[numbers, :n] = (words or SlotWords(layout.null_slot)).of(slots, requests)
    cu_q_lens = layout.view(buffer, "cu_q_lens")
    cu_q_lens[n + 1:] = plan.num_tokens
    np.cumsum(lengths, out=cu_q_lens[1:n + 1])
    kv_lens = np.add(starts, lengths)
    for name, values, padding in (
            ("slots", slots, layout.null_slot), ("from_device", from_device, 0), ("samples", samples, 0), ("kv_lens", kv_lens, 0),
            ("sampling.position", kv_lens, 0)):
        field = layout.view(buffer, name)
        field[:n], field[n:] = values, padding
    if not all(from_device):
        fresh = layout.view(buffer, "token_ids")
        for start, ids in zip(cu_q_lens.tolist(), token_ids, strict=False):
            fresh[start:start + len(ids)] = ids
    if any(request.params.min_tokens for request in requests):
        _bar_ends(layout.view(buffer, "sampling.mask"), plan)
    _put_updates(buffer, layout, updates)
    return buffer


def _bar_ends(masks: np.ndarray, plan: SchedulePlan) -> None:
    """Rows short of their min_tokens take the mask without end tokens; a grammar's mask heeds min_tokens by itself."""
    for b, row in enumerate(plan.rows):
        request = row.request
        if row.kv_len - len(request.prompt_token_ids) < request.params.min_tokens and request.grammar is None:
            masks[b] = 2


def pack_again(buffer: np.ndarray, plan: SchedulePlan, layout: StepLayout) -> np.ndarray:
    """The input of a step that computes the next token of each row of the step before: a tenth of pack()'s work.

    Args:
      buffer: the step before's, of the same layout; not changed, since the device may still read it.
      plan: from Scheduler.again(): rows without rules, their tokens on the device, at most layout.num_updates page updates.
      layout: the bucket.

    Returns:
      [layout.num_words] int32.
    """
    n, buffer = len(plan.rows), buffer.copy()
    layout.view(buffer, "from_device")[:n] = 1
    layout.view(buffer, "kv_lens")[:n] += 1
    layout.view(buffer, "sampling.position")[:n] += 1
    _put_updates(buffer, layout, plan.page_updates)
    return buffer


def _put_updates(buffer: np.ndarray, layout: StepLayout, updates: Sequence[tuple[int, int, int]]) -> None:
    """Page-table writes; those of padding go to the null slot's null page."""
    assert len(updates) <= layout.num_updates, (len(updates), layout.num_updates)
    columns = np.asarray(updates, np.int32).reshape(-1, 3).T
    for name, values, padding in zip(("update_slots", "update_entries", "update_pages"), columns, (layout.null_slot, 0, 0), strict=True):
        field = layout.view(buffer, name)
        field[:len(values)], field[len(values):] = values, padding
