"""What is compiled: each kernel at its named shapes, and whole decode and prefill steps. Makes no arrays, only shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.compiled import make_state
from jaxinfer.engine.step import step
from jaxinfer.models.registry import abstract_model
from jaxinfer.models.shapes import SHAPES
from jaxinfer.state import StepLayout
from pallas_kernels import ragged_paged_attention, write_kv_pages

PAGE_SIZE = 64
NUM_PAGES = 600
MAX_MODEL_LEN = 4096
SLOTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A function and the shapes that it is compiled for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    is_kernel: bool = True
    """A kernel must not spill; a step's XLA fusions are XLA's business."""


def all_cases() -> dict[str, Callable[[], Case]]:
    """Name -> maker of the case; made lazily, since tracing reads the target. Steps have all their layers."""
    cases: dict[str, Callable[[], Case]] = {}
    for name, heads, kv_heads, head_dim in (("q", 28, 4, 128), ("m", 32, 32, 128), ("h64", 14, 2, 64)):
        for rows in (1, 32, 128):
            cases[f"kernel-decode-{name}-b{rows}"] = functools.partial(_attention, rows, rows, heads, kv_heads, head_dim, 1)
        cases[f"kernel-prefill-{name}-t2048"] = functools.partial(_attention, 2048, 8, heads, kv_heads, head_dim, None)
        cases[f"kernel-write-{name}-t32"] = functools.partial(_write, 32, 32, kv_heads, head_dim)
        cases[f"kernel-write-{name}-t2048"] = functools.partial(_write, 2048, 8, kv_heads, head_dim)
    for shape in ("Q", "M"):
        for rows in (1, 32):
            cases[f"step-decode-{shape.lower()}-b{rows}"] = functools.partial(_step, shape, rows, rows, True)
        cases[f"step-prefill-{shape.lower()}-t2048"] = functools.partial(_step, shape, 2048, 8, False)
    return cases


def _shape(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _rows(num_rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """page_table, cu_q_lens, kv_lens."""
    return _shape((num_rows, MAX_MODEL_LEN // PAGE_SIZE), np.int32), _shape((num_rows + 1,), np.int32), _shape((num_rows,), np.int32)


def _attention(num_tokens: int, num_rows: int, heads: int, kv_heads: int, head_dim: int, max_q_len: int | None) -> Case:
    pages = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim))
    run = functools.partial(ragged_paged_attention, scale=head_dim ** -0.5, max_q_len=max_q_len)
    return Case(function=run, arguments=(_shape((num_tokens, heads, head_dim)), pages, pages, *_rows(num_rows)))


def _write(num_tokens: int, num_rows: int, kv_heads: int, head_dim: int) -> Case:
    pages, new = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim)), _shape((num_tokens, kv_heads, head_dim))
    return Case(function=write_kv_pages, arguments=(new, new, pages, pages, *_rows(num_rows)), donated=(2, 3))


def _step(shape: str, num_tokens: int, num_rows: int, decode_only: bool) -> Case:
    """One engine step of a named shape in bfloat16, the state donated."""
    config = SHAPES[shape]
    graphdef, specs = abstract_model(config, "bfloat16")
    params = {name: _shape(spec.shape, spec.dtype) for name, spec in specs.items()}
    layout = StepLayout(num_tokens=num_tokens, num_rows=num_rows, num_updates=num_tokens // PAGE_SIZE + 2 * num_rows, null_slot=SLOTS,
                        decode_only=decode_only)
    state = make_state(config, jax.ShapeDtypeStruct, max_num_seqs=SLOTS, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
                       num_pages_per_seq=MAX_MODEL_LEN // PAGE_SIZE, max_num_tokens=2048, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16)
    run = functools.partial(step, graphdef=graphdef, layout=layout, num_valid_tokens=config.vocab_size, attention_implementation=None)
    return Case(function=run, arguments=(params, state, _shape((layout.num_words,), np.int32)), donated=(1,), is_kernel=False)
