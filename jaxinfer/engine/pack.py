"""Turns a SchedulePlan into the packed host buffer of one bucket: all padding is here. numpy only, no jax."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.prompt_scores import wants_scores
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan
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


def pack(plan: SchedulePlan, layout: StepLayout, updates: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """One step's input as int32 words.

    Args:
      plan: rows in order; row b's tokens are packed at [cu_q_lens[b], cu_q_lens[b+1]).
      layout: a bucket that holds the plan; rows and tokens past it are padding (slot S, empty, greedy).
      updates: page-table writes (slot, entry, page), at most layout.num_updates.

    Returns:
      [layout.num_words] int32, for StepLayout.unpack.
    """
    rows, n = plan.rows, len(plan.rows)
    assert len(updates) <= layout.num_updates, (len(updates), layout.num_updates)
    buffer = np.zeros(layout.num_words, np.int32)

    def put(name: str, values: list) -> None:
        layout.view(buffer, name)[:len(values)] = values

    layout.view(buffer, "slots")[n:] = layout.null_slot
    layout.view(buffer, "update_slots")[len(updates):] = layout.null_slot
    layout.view(buffer, "sampling.top_p")[n:] = 1.0
    layout.view(buffer, "sampling.repetition_penalty")[:] = 1.0
    cu_q_lens = layout.view(buffer, "cu_q_lens")
    np.cumsum([row.num_tokens for row in rows], out=cu_q_lens[1:n + 1])
    cu_q_lens[n + 1:] = plan.num_tokens
    token_ids = layout.view(buffer, "token_ids")
    for start, row in zip(cu_q_lens.tolist(), rows, strict=False):
        if not row.from_device:
            token_ids[start:start + row.num_tokens] = row.token_ids
    put("from_device", [row.from_device for row in rows])
    put("slots", [row.slot for row in rows])
    put("kv_lens", [row.start + row.num_tokens for row in rows])
    put("prompt_lens", [len(row.request.prompt_token_ids) for row in rows])
    put("samples", [row.samples for row in rows])
    params = [row.request.params for row in rows]
    put("sampling.temperature", [p.temperature for p in params])
    put("sampling.top_p", [p.top_p for p in params])
    put("sampling.min_p", [p.min_p for p in params])
    put("sampling.top_k", [p.top_k for p in params])
    put("sampling.seed", [row.request.seed for row in rows])
    put("sampling.sample_index", [row.request.sample_index for row in rows])
    put("sampling.position", [row.start + row.num_tokens for row in rows])
    for b, row in enumerate(rows):
        if not row.request.params.is_plain:
            _put_rules(buffer, layout, b, row)
    if updates:
        for name, values in zip(("update_slots", "update_entries", "update_pages"), zip(*updates, strict=True), strict=True):
            put(name, list(values))
    return buffer


def _put_rules(buffer: np.ndarray, layout: StepLayout, b: int, row: ScheduledRow) -> None:
    """What row b wants beside temperature, top-k, top-p and min-p."""
    request, params = row.request, row.request.params
    early = row.kv_len - len(request.prompt_token_ids) < params.min_tokens
    barred = params.allowed_token_ids is not None or bool(params.bad_words)
    values = {
        "repetition_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty, "mask": 2 if early else int(barred), "has_biases": bool(params.biases),
        "has_words": any(len(ids) > 1 for ids in request.bad_word_ids), "wants_logprobs": params.logprobs is not None}
    for name, value in values.items():
        layout.view(buffer, f"sampling.{name}")[b] = value
