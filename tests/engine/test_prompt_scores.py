"""Which hidden rows are scored against which prompt tokens, and that such a plan keeps its hidden states."""

import dataclasses

import numpy as np

from jaxinfer.engine.pack import pick_layout
from jaxinfer.engine.prompt_scores import NUM_SCORES, score_calls
from tests.engine.test_pack import layout, make_plan, row


def scored(slot, start, num_tokens, prompt_len, *, scores=True):
    made = row(slot, start, list(range(num_tokens)))
    made.request.scores_prompt = scores
    made.request.prompt_token_ids = tuple(range(1000, 1000 + prompt_len))
    return made


def test_rows_and_targets_of_chunks():
    plan = make_plan(scored(0, 0, 3, 50, scores=False), scored(1, 10, 4, 14), scored(2, 0, 300, 400))
    first, *rest = score_calls(plan)
    assert (first.request, first.start, first.num_tokens) == (plan.rows[1].request, 11, 3)  # the last token has no next one
    assert first.rows[:3].tolist() == [3, 4, 5] and first.targets[:3].tolist() == [1011, 1012, 1013] and not first.targets[3:].any()
    assert [(c.start, c.num_tokens) for c in rest] == [(1, 128), (129, 128), (257, 44)] and NUM_SCORES == 128
    assert (np.concatenate([c.rows[:c.num_tokens] for c in rest]) == np.arange(300) + 7).all()
    assert (np.concatenate([c.targets[:c.num_tokens] for c in rest]) == np.arange(300) + 1001).all()


def test_a_scored_chunk_of_one_token_takes_a_mixed_bucket():
    layouts = (layout(4, 4, True), layout(16, 6))
    for start, prompt_len, want in ((2, 9, 1), (8, 9, 0)):
        plan = dataclasses.replace(make_plan(scored(0, start, 1, prompt_len), row(1, 60, [1])), num_prefill_tokens=1)
        assert pick_layout(layouts, plan) is layouts[want]
        assert len(list(score_calls(plan))) == want
