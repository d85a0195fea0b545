"""Packing a plan and unpacking it on the device give back the plan; padding is inert."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.pack import pack, pick_layout
from jaxinfer.request import Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan
from jaxinfer.state import StepLayout

S = 6


def layout(num_tokens, num_rows, decode_only=False):
    return StepLayout(num_tokens=num_tokens, num_rows=num_rows, num_updates=4, null_slot=S, decode_only=decode_only)


def row(slot, start, ids, *, from_device=False, samples=True, **params):
    request = Request(request_id=str(slot), prompt_token_ids=tuple(range(50)), params=SamplingParams(**params), max_total_len=100,
                      stop_token_ids=frozenset(), seed=2**32 - 1, sample_index=2)
    return ScheduledRow(request=request, slot=slot, start=start, num_tokens=len(ids) or 1, token_ids=tuple(ids), from_device=from_device,
                        samples=samples)


def make_plan(*rows):
    return SchedulePlan(rows=rows, page_updates=(), num_tokens=sum(r.num_tokens for r in rows),
                        num_prefill_tokens=sum(r.num_tokens for r in rows if r.num_tokens > 1), preempted=())


def test_round_trip_and_padding():
    plan = make_plan(row(3, 10, [], from_device=True, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7),
                     row(1, 4, [11, 12, 13], samples=False))
    where = layout(8, 4)
    buffer = pack(plan, where, [(3, 0, 9), (1, 1, 5)])
    assert buffer.dtype == np.int32 and buffer.shape == (where.num_words,)
    got = where.unpack(jnp.asarray(buffer))
    assert got.token_ids.tolist() == [0, 11, 12, 13, 0, 0, 0, 0]
    assert got.cu_q_lens.tolist() == [0, 1, 4, 4, 4] and got.kv_lens.tolist() == [11, 7, 0, 0]
    assert got.slots.tolist() == [3, 1, S, S] and got.from_device.tolist() == [1, 0, 0, 0] and got.samples.tolist() == [1, 0, 0, 0]
    assert got.update_slots.tolist() == [3, 1, S, S] and got.update_entries.tolist() == [0, 1, 0, 0]
    assert got.update_pages.tolist() == [9, 5, 0, 0] and got.prompt_lens.tolist() == [50, 50, 0, 0]
    sampling = {f.name: np.asarray(getattr(got.sampling, f.name)) for f in dataclasses.fields(got.sampling)}
    assert sampling["temperature"].tolist() == [0.5, 1.0, 0, 0] and sampling["top_p"].tolist() == [0.25, 1, 1, 1]
    assert sampling["min_p"].tolist() == [0.125, 0, 0, 0] and sampling["top_k"].tolist() == [7, 0, 0, 0]
    assert sampling["seed"].dtype == np.uint32 and sampling["seed"].tolist() == [2**32 - 1, 2**32 - 1, 0, 0]
    assert sampling["repetition_penalty"].tolist() == [1, 1, 1, 1] and not sampling["mask"].any() and not sampling["wants_logprobs"].any()
    assert sampling["slots"].tolist() == [3, 1, S, S] and sampling["prompt_lens"].tolist() == [50, 50, 0, 0]
    assert sampling["position"].tolist() == [11, 7, 0, 0] and sampling["sample_index"].tolist() == [2, 2, 0, 0]


def test_pick_layout_takes_the_smallest_that_fits():
    layouts = (layout(1, 1, True), layout(4, 4, True), layout(16, 2), layout(16, 6), layout(64, 6))
    decode = [row(i, 5, [1]) for i in range(6)]
    assert pick_layout(layouts, make_plan(decode[0])) is layouts[0]
    assert pick_layout(layouts, make_plan(*decode[:3])) is layouts[1]
    assert pick_layout(layouts, make_plan(*decode)) is layouts[3]
    assert pick_layout(layouts, make_plan(row(0, 0, [1, 2]))) is layouts[2]
    assert pick_layout(layouts, make_plan(row(0, 0, list(range(17))))) is layouts[4]
