"""The mixed batch: decodes and prompts of awkward lengths in one call, against the oracle and against its two parts run apart."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from bench.kernels.attention import HEAD_DIM, SCALE
from bench.kernels.operands import paged
from bench.kernels.rows import Arrays, Check, Item, LeftOut, Line, Row, Rows, Settings, attention_work, find_line, mixed_figures
from bench.kernels.running import supported
from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.api import IMPLS, attention_spec

OP = "mixed"
CONTEXTS, PROMPTS, HEADS = (1, 17, 300, 512, 1024, 2500, 5000), (1, 17, 511, 512, 513, 2049), (28, 4)
TINY_CONTEXTS, TINY_PROMPTS, TINY_HEADS = (1, 33), (5, 17), (4, 2)
PADDING = 8  # tokens behind the last row, as a bucket has them


def mixed_items(settings: Settings) -> Iterator[Item]:
    """The whole, its decodes and its prompts by the implementation that the op takes by itself for each; then the two checks."""
    contexts, prompts, heads = (TINY_CONTEXTS, TINY_PROMPTS, TINY_HEADS) if settings.tiny else (CONTEXTS, PROMPTS, HEADS)
    decode_rows, prompt_rows = tuple((1, n) for n in contexts), tuple((n, n) for n in prompts)
    name = f"{len(contexts)} decodes, {len(prompts)} prompts {heads[0]}/{heads[1]}"
    parts = {"whole": decode_rows + prompt_rows, "decodes": decode_rows, "prompts": prompt_rows}
    chosen: dict[str, str] = {}
    for part, rows in parts.items():
        for item in _items(settings, f"{name}: {part}", rows, *heads):
            yield item
            if isinstance(item, Row):
                chosen[part] = item.implementation
    if set(chosen) != set(parts):
        yield LeftOut(op=OP, shape=name, implementation="checks", reason=f"no implementation for {sorted(set(parts) - set(chosen))}")
        return
    yield Check(op=OP, shape=name, evaluate=functools.partial(compare_parts, name=name, is_judged=not settings.tiny))
    yield Check(op=OP, shape=name, evaluate=functools.partial(against_oracle, settings=settings, rows=parts["whole"], heads=heads,
                                                              implementation=chosen["whole"]))


def _items(settings: Settings, shape: str, rows: Rows, heads: int, kv_heads: int) -> Iterator[Row | LeftOut]:
    """A part's row, and what stands before it in the table."""
    is_decode = all(q == 1 for q, _ in rows)
    make = _maker(settings, rows, heads, kv_heads)
    statics: dict[str, Any] = {"scale": SCALE, "max_q_len": 1 if is_decode else None}
    spec = attention_spec(*jax.eval_shape(lambda: make(0)), **statics, sliding_window=None, softcap=None)
    for name in supported(OP, shape, IMPLS, spec, settings):
        if isinstance(name, LeftOut):
            yield name
            continue
        yield Row(op=OP, shape=shape, implementation=name, make=make, unit="TB/s" if is_decode else "TFLOP/s",
                  function=functools.partial(pallas_kernels.ragged_paged_attention, **statics, implementation=name),
                  **attention_work(rows, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM))
        return


def _maker(settings: Settings, rows: Rows, heads: int, kv_heads: int) -> Any:
    return functools.partial(paged, rows=rows, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, page_size=settings.page_size,
                             num_padding=PADDING)


def compare_parts(lines: list[Line], *, name: str, is_judged: bool) -> dict[str, Any]:
    """Time of the whole over that of its parts (at most 1.1), and the rate that its prefill keeps (at least 0.9)."""
    found = {part: find_line(lines, op=OP, shape=f"{name}: {part}") for part in ("whole", "decodes", "prompts")}
    missing = [part for part, x in found.items() if x is None]
    if missing:
        return {"check": "parts", "ok": False, "reason": f"not timed: {', '.join(missing)}"}
    us = {part: x["us"] for part, x in found.items() if x is not None}
    figures = mixed_figures(mixed_us=us["whole"], decodes_us=us["decodes"], prompts_us=us["prompts"])
    return {"check": "parts", "ok": not is_judged or (figures["time_ok"] and figures["rate_ok"]), **figures}


def against_oracle(lines: list[Line], *, settings: Settings, rows: Rows, heads: tuple[int, int], implementation: str) -> dict[str, Any]:
    """The kernel's error against the float32 reference on this device, and its budget: twice a naive bfloat16 form's, plus rounding.

    Slots without a token and the null page hold NaN, as in the tests.
    """
    del lines
    q, k_pages, v_pages, *rest = poison(_maker(settings, rows, *heads)(0), rows, settings.page_size)
    arrays = (q, k_pages, v_pages, *rest)
    run = functools.partial(pallas_kernels.ragged_paged_attention, scale=SCALE, implementation=implementation)
    got = np.asarray(jax.jit(run)(*arrays), np.float32)
    widened = (q.astype(jnp.float32), *arrays[1:])
    truth = np.asarray(jax.jit(functools.partial(reference.ragged_paged_attention, scale=SCALE))(*widened))
    naive = np.asarray(naive_attention(arrays, rows), np.float32)
    is_clean = bool(np.isfinite(got).all() and (got[sum(n for n, _ in rows):] == 0).all())
    worst = max(row_errors(got, truth, naive, rows), key=lambda figures: figures["of_budget"])
    return {"check": "oracle", "ok": is_clean and worst["of_budget"] <= 1, "implementation": implementation, **worst,
            "padding_is_zero_and_all_finite": is_clean}


def row_errors(got: np.ndarray, truth: np.ndarray, naive: np.ndarray, rows: Rows) -> Iterator[dict[str, Any]]:
    """Of each row the largest error and its budget. A row by itself: long rows' outputs are small, and short ones' would hide them."""
    start = 0
    for q_len, kv_len in rows:
        part = slice(start, start + q_len)
        start += q_len
        error, naive_error = (float(np.abs(x[part] - truth[part]).max()) for x in (got, naive))
        budget = 2 * naive_error + 4 * float(jnp.finfo(jnp.bfloat16).eps) * float(np.abs(truth[part]).max())
        of_budget = error / budget if np.isfinite(error) else float("inf")
        yield {"row": [q_len, kv_len], "error": error, "budget": budget, "naive_error": naive_error, "of_budget": of_budget}


def poison(operands: Arrays, rows: Rows, page_size: int) -> Arrays:
    """`paged` operands with NaN in the null page and in every slot at or past its row's end."""
    q, k_pages, v_pages, table, *rest = operands
    unused = np.zeros((k_pages.shape[0], page_size), bool)
    unused[0] = True
    for b, (_, kv_len) in enumerate(rows):
        if kv_len % page_size:
            unused[int(table[b, kv_len // page_size]), kv_len % page_size:] = True
    pools = jax.jit(lambda *pools: [jnp.where(unused[:, None, :, None], jnp.nan, pool) for pool in pools])(k_pages, v_pages)
    return q, *pools, table, *rest


def naive_attention(operands: Arrays, rows: Rows) -> np.ndarray:
    """[T, N, H]: row by row, every operation rounded to q's dtype, products accumulated in float32. Padding is 0."""
    q, k_pages, v_pages, table, _, _ = operands
    longest = max(q_len for q_len, _ in rows)
    padded = jnp.pad(q, ((0, longest), (0, 0), (0, 0)))
    out, start = np.zeros(q.shape, np.float32), 0
    for b, (q_len, kv_len) in enumerate(rows):
        row = _naive_row(padded, k_pages, v_pages, table[b], np.int32(start), np.int32(q_len), np.int32(kv_len), longest=longest)
        out[start:start + q_len] = np.asarray(row[:q_len], np.float32)
        start += q_len
    return out


@functools.partial(jax.jit, static_argnames=("longest",))
def _naive_row(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, entries: jax.Array, start: jax.Array, q_len: jax.Array,
               kv_len: jax.Array, *, longest: int) -> jax.Array:
    """`longest` tokens of [T, N, H] from `start` on, over one row's pages; of use up to q_len. One executable serves all rows."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, page_size = k_pages.shape[1:3]
    key_pos = jnp.arange(entries.shape[0] * page_size)
    # Slots that hold no token may hold NaN, and 0 * NaN is NaN.
    keys, values = (jnp.where((key_pos < kv_len)[:, None, None],
                              jnp.moveaxis(pool[entries], 1, 2).reshape(-1, num_kv_heads, head_dim), 0) for pool in (k_pages, v_pages))
    queries = lax.dynamic_slice_in_dim(q, start, longest).reshape(longest, num_kv_heads, num_heads // num_kv_heads, head_dim)
    products = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = products("tkgh,skh->kgts", queries, keys).astype(q.dtype) * jnp.asarray(SCALE, q.dtype)
    scores = jnp.where(key_pos <= jnp.arange(longest)[:, None] + (kv_len - q_len), scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return products("kgts,skh->tkgh", weights, values).astype(q.dtype).reshape(longest, num_heads, head_dim)
