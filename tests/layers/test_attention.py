"""The two contexts: dense attention against numpy, and paged against dense, whole, chunked and token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.load import LoadedModel, random_model
from jaxinfer.layers.attention import DenseContext, PagedContext
from jaxinfer.layers.forced import NOTHING_FORCED
from jaxinfer.layers.rotary import RotaryAngles
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import bind
from jaxinfer.models.shapes import SHAPES
from jaxinfer.state import KVCache

PAGE_LEN = 16


def dense_numpy(q, k, v, lengths, scale, window):
    """Loops over rows, queries and heads in float64; q [B, T, N, H], k and v [B, T, K, H]."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, length in enumerate(lengths):
        for t in range(length):
            first = 0 if window is None else max(0, t + 1 - window)
            for n in range(q.shape[2]):
                scores = scale * k[b, first:t + 1, n // group] @ q[b, t, n]
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights / weights.sum() @ v[b, first:t + 1, n // group]
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
def test_dense_context_matches_a_loop(window):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 7, 4, 8)), rng.normal(size=(2, 7, 2, 8)), rng.normal(size=(2, 7, 2, 8))
    lengths = np.array([7, 3], np.int32)
    k[1, 3:] = v[1, 3:] = 1e6  # padding must not be seen
    qkv = np.concatenate([x.reshape(14, 2, -1, 8) for x in (q, k, v)], axis=2)
    still = jnp.ones((14, 4)), jnp.zeros((14, 4))  # cosines and sines of an angle of 0
    context = DenseContext(lengths=jnp.asarray(lengths), prompt_lens=jnp.asarray(lengths))
    got, _ = context.attend(0, jnp.asarray(qkv, jnp.float32), RotaryAngles(still, still), scale=0.3, sliding_window=window)
    np.testing.assert_allclose(got.reshape(q.shape), dense_numpy(q, k, v, lengths, 0.3, window), atol=2e-6)


def test_contexts_hand_out_each_tokens_prompt_length():
    paged = PagedContext(cache=KVCache(k=(), v=()), page_table=jnp.zeros((3, 1), jnp.int32), cu_q_lens=jnp.array([0, 2, 5, 5]),
                         kv_lens=jnp.array([2, 9, 0]), prompt_lens=jnp.array([7, 8, 0]), max_q_len=None, forced=NOTHING_FORCED)
    assert paged.token_prompt_lens(5).tolist() == [7, 7, 8, 8, 8]
    assert paged.token_prompt_lens(8).shape == (8,)
    dense = DenseContext(lengths=jnp.array([2, 3]), prompt_lens=jnp.array([2, 1]))
    assert dense.token_prompt_lens(6).tolist() == [2, 2, 2, 1, 1, 1]


@functools.cache
def model_with_window(window: int | None) -> LoadedModel:
    config: ModelConfig = SHAPES["tiny"]
    windows = (None, window) if window else config.sliding_windows
    return random_model(config.__class__(**{**vars(config), "sliding_windows": windows}), dtype="float32", seed=1)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def paged_step(graphdef, params, tokens, positions, context):
    model = bind(graphdef, params)
    hidden, context = model(tokens, positions, context)
    return model.logits(hidden), context


class PagedRun:
    """A few sequences in pages that are scattered over a pool filled with NaN."""

    def __init__(self, model: LoadedModel, num_rows: int, pages_per_row: int):
        config = model.config
        num_pages = 1 + num_rows * pages_per_row
        shape = (num_pages, config.num_kv_heads, PAGE_LEN, config.head_dim)
        pool = tuple(jnp.full(shape, jnp.nan).at[0].set(0.0) for _ in range(config.num_layers))
        self.model, self.cache, self.kv_lens = model, KVCache(k=pool, v=pool), np.zeros(num_rows, np.int32)
        order = np.random.default_rng(5).permutation(np.arange(1, num_pages))
        self.page_table = jnp.asarray(order.reshape(num_rows, pages_per_row), jnp.int32)

    def step(self, rows: list[list[int]], *, bucket: int, max_q_len: int | None = None) -> list[np.ndarray]:
        """Feeds new tokens for every row (none for some), padded to the bucket; logits of each row's tokens."""
        lens = np.array([len(r) for r in rows], np.int32)
        tokens, positions = np.zeros(bucket, np.int32), np.zeros(bucket, np.int32)
        tokens[:lens.sum()] = np.concatenate(rows) if lens.sum() else []
        positions[:lens.sum()] = np.concatenate([np.arange(start, start + n) for start, n in zip(self.kv_lens, lens, strict=True)])
        cu_q_lens = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        self.kv_lens = self.kv_lens + lens
        context = PagedContext(
            cache=self.cache, page_table=self.page_table, cu_q_lens=jnp.asarray(cu_q_lens), kv_lens=jnp.asarray(self.kv_lens),
            prompt_lens=jnp.asarray(self.kv_lens), max_q_len=max_q_len, forced=NOTHING_FORCED)
        logits, context = paged_step(self.model.graphdef, self.model.params, jnp.asarray(tokens), jnp.asarray(positions), context)
        self.cache = context.cache
        return [np.asarray(logits[cu_q_lens[b]:cu_q_lens[b + 1]]) for b in range(len(rows))]


@pytest.mark.parametrize("window", [None, 8])
def test_paged_equals_dense_whole_chunked_and_token_by_token(window):
    model = model_with_window(window)
    lengths = [37, 20]
    tokens = np.random.default_rng(6).integers(0, 256, (2, 37)).astype(np.int32)
    want = np.asarray(jax.jit(model.logits)(jnp.asarray(tokens), jnp.asarray(lengths)))
    run = PagedRun(model, num_rows=2, pages_per_row=3)
    parts = [(0, 13), (13, 17), (17, 18), (18, 19)]
    parts += [(a, a + 1) for a in range(19, 37)]
    got: list[list[np.ndarray]] = [[], []]
    for start, stop in parts:
        rows = [tokens[b, start:min(stop, length)].tolist() for b, length in enumerate(lengths)]
        decode = stop - start == 1 and all(len(r) == 1 for r in rows)
        bucket = 2 if decode else 64
        for b, logits in enumerate(run.step(rows, bucket=bucket, max_q_len=1 if decode else None)):
            got[b].append(logits)
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(np.concatenate(got[b]), want[b, :length], atol=1e-4)
    whole = PagedRun(model, num_rows=2, pages_per_row=3)
    for b, logits in enumerate(whole.step([tokens[b, :n].tolist() for b, n in enumerate(lengths)], bucket=64)):
        np.testing.assert_allclose(logits, want[b, :lengths[b]], atol=1e-4)
