"""What is compiled: each kernel at its named shapes and at its edges, and whole decode and prefill steps. Makes no arrays, only shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.fresh_state import make_state
from jaxinfer.engine.load import tensor_parallel_shardings
from jaxinfer.engine.placement import Placement
from jaxinfer.engine.step import burst, step
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import abstract_model
from jaxinfer.models.shapes import SHAPES
from jaxinfer.state import DeviceState, StepLayout
from pallas_kernels import (
    copy_pages,
    flash_attention,
    int4_matmul,
    packed_shape,
    paged_gather,
    ragged_paged_attention,
    rms_norm,
    rotary_kv_write,
    write_kv_pages,
)

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
    shares: Callable[[Placement], tuple[Any, Any]] | None = None
    """Of a program that devices run on their shares: the shardings of its arguments and of its results."""
    num_devices: int = 1


def all_cases() -> dict[str, Callable[[], Case]]:
    """Name -> maker of the case; made lazily, since tracing reads the target. Steps have all their layers, the burst and
    the step over two GPUs have four: what they must not do, copy a pool or make temporaries that a step does not make, shows in any."""
    cases: dict[str, Callable[[], Case]] = {}
    for name, heads, kv_heads, head_dim in (("q", 28, 4, 128), ("m", 32, 32, 128), ("h64", 14, 2, 64)):
        for rows in (1, 32, 128):
            cases[f"kernel-decode-{name}-b{rows}"] = functools.partial(_attention, rows, rows, heads, kv_heads, head_dim, 1)
        cases[f"kernel-prefill-{name}-t2048"] = functools.partial(_attention, 2048, 8, heads, kv_heads, head_dim, None)
        cases[f"kernel-rotary-write-{name}-t32"] = functools.partial(_rotary_write, 32, 32, heads, kv_heads, head_dim)
        cases[f"kernel-rotary-write-{name}-t2048"] = functools.partial(_rotary_write, 2048, 8, heads, kv_heads, head_dim)
    cases["kernel-write-q-t32"] = functools.partial(_write, 32, 32, 4, 128)
    cases |= _edges() | _dense() | _int4()
    for shape in ("Q", "M"):
        for rows in (8, 32):
            cases[f"step-decode-{shape.lower()}-b{rows}"] = functools.partial(_step, shape, rows, rows, True)
        cases[f"step-prefill-{shape.lower()}-t2048"] = functools.partial(_step, shape, 2048, 8, False)
    cases["step-decode-q-b8-2gpus"] = functools.partial(_shared_step, "Q", 8, num_devices=2, num_layers=4)
    cases["burst-decode-q-b8"] = functools.partial(_burst, "Q", 8, num_steps=8, num_layers=4)
    return cases


def _edges() -> dict[str, Callable[[], Case]]:
    """Small calls beyond the named shapes: each page size, most splits, windows, caps, float16, and the sm_80 prefill kernel on sm_90 too."""
    decode = functools.partial(_attention, 8, 8, 8, 8, 128, 1)
    prefill = functools.partial(_attention, 512, 4, 8, 2, 128, None)
    return {
        "kernel-decode-page32-window": functools.partial(decode, page_size=32, sliding_window=1000),
        "kernel-decode-page96-softcap": functools.partial(decode, page_size=96, softcap=30.0),
        "kernel-decode-page128": functools.partial(decode, page_size=128),
        "kernel-decode-longest-b1": functools.partial(_attention, 1, 1, 28, 4, 128, 1, max_model_len=32768),
        "kernel-prefill-page32-window": functools.partial(prefill, page_size=32, sliding_window=1000),
        "kernel-prefill-page96-softcap": functools.partial(prefill, page_size=96, softcap=30.0),
        "kernel-prefill-page128-f16": functools.partial(prefill, page_size=128, dtype=jnp.float16),
        "kernel-prefill-mosaic-window": functools.partial(_attention, 512, 4, 8, 2, 64, None, sliding_window=1000, implementation="mosaic"),
        "kernel-norm-d3584-residual": functools.partial(_norm, 128, 3584, True),
        "kernel-norm-d896": functools.partial(_norm, 8, 896, False),
    }


def _dense() -> dict[str, Callable[[], Case]]:
    """Flash attention at both head dims and all masks, and pages that are copied or gathered."""
    return {
        "kernel-flash-h64-causal-odd": functools.partial(_flash, 1023, 64, causal=True),
        "kernel-flash-h128-causal": functools.partial(_flash, 1024, 128, causal=True),
        "kernel-flash-h64-segments-softcap": functools.partial(_flash, 999, 64, segments=True, causal=False, softcap=30.0),
        "kernel-flash-h128-window-mosaic": functools.partial(_flash, 1001, 128, lengths=True, causal=True, sliding_window=300,
                                                             implementation="mosaic"),
        "pages-copy-u16": functools.partial(_copy_pages, 16),
        "pages-gather-b8": functools.partial(_gather, 8, 999),
    }


def _int4() -> dict[str, Callable[[], Case]]:
    """The int4 product of few tokens and of more: the narrow and the wide matrix of shape Q, the deep one, small groups, 8 bits, float16."""
    return {
        "kernel-int4-qkv-t8": functools.partial(_int4_matmul, 8, 3584, 4608),
        "kernel-int4-gate-up-t8": functools.partial(_int4_matmul, 8, 3584, 37888),
        "kernel-int4-down-t8": functools.partial(_int4_matmul, 8, 18944, 3584),
        "kernel-int4-qkv-t16": functools.partial(_int4_matmul, 16, 3584, 4608),
        "kernel-int4-qkv-t64": functools.partial(_int4_matmul, 64, 3584, 4608),
        "kernel-int4-gate-up-t32": functools.partial(_int4_matmul, 32, 3584, 37888),
        "kernel-int4-gate-up-t64": functools.partial(_int4_matmul, 64, 3584, 37888),
        "kernel-int4-down-t128": functools.partial(_int4_matmul, 128, 18944, 3584),
        "kernel-int4-group32-t8": functools.partial(_int4_matmul, 8, 3584, 4608, group_size=32),
        "kernel-int8-f16-t8": functools.partial(_int4_matmul, 8, 3584, 4608, bits=8, dtype=jnp.float16),
    }


def _shape(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _rows(num_rows: int, *, max_model_len: int = MAX_MODEL_LEN, page_size: int = PAGE_SIZE) -> tuple[jax.ShapeDtypeStruct, ...]:
    """page_table, cu_q_lens, kv_lens."""
    return _shape((num_rows, max_model_len // page_size), np.int32), _shape((num_rows + 1,), np.int32), _shape((num_rows,), np.int32)


def _attention(num_tokens: int, num_rows: int, heads: int, kv_heads: int, head_dim: int, max_q_len: int | None, *,
               max_model_len: int = MAX_MODEL_LEN, page_size: int = PAGE_SIZE, dtype: Any = jnp.bfloat16, **statics: Any) -> Case:
    pages = _shape((NUM_PAGES, kv_heads, page_size, head_dim), dtype)
    run = functools.partial(ragged_paged_attention, scale=head_dim ** -0.5, max_q_len=max_q_len, **statics)
    rows = _rows(num_rows, max_model_len=max_model_len, page_size=page_size)
    return Case(function=run, arguments=(_shape((num_tokens, heads, head_dim), dtype), pages, pages, *rows))


def _norm(num_tokens: int, width: int, residual: bool) -> Case:
    x = _shape((num_tokens, width))
    return Case(function=functools.partial(rms_norm, eps=1e-6, implementation="mosaic"),
                arguments=(x, _shape((width,)), *([x] if residual else [])))


def _flash(length: int, head_dim: int, *, lengths: bool = False, segments: bool = False, **statics: Any) -> Case:
    """Two rows of `length` queries and keys, 8 heads over 2 KV heads."""
    integers = {name: _shape((2,), np.int32) for name in ("q_lengths", "kv_lengths") if lengths}
    integers |= {name: _shape((2, length), np.int32) for name in ("q_segment_ids", "kv_segment_ids") if segments}

    def run(q: jax.Array, k: jax.Array, v: jax.Array, integers: dict[str, Any]) -> jax.Array:
        return flash_attention(q, k, v, scale=head_dim ** -0.5, **integers, **statics)

    kv = _shape((2, length, 2, head_dim))
    return Case(function=run, arguments=(_shape((2, length, 8, head_dim)), kv, kv, integers))


def _int4_matmul(m: int, k: int, n: int, *, bits: int = 4, group_size: int = 128, dtype: Any = jnp.bfloat16) -> Case:
    groups = (k // group_size, n)
    return Case(function=functools.partial(int4_matmul, group_size=group_size, bits=bits), arguments=(
        _shape((m, k), dtype), _shape(packed_shape(k, n, bits=bits), np.int16), _shape(groups, jnp.float16), _shape(groups)))


def _copy_pages(num_copies: int) -> Case:
    pools = [_shape((NUM_PAGES, 4, PAGE_SIZE, 128))] * 4
    return Case(function=copy_pages, arguments=(pools, *[_shape((num_copies,), np.int32)] * 2), donated=(0,), is_kernel=False)


def _gather(num_rows: int, max_len: int) -> Case:
    pages, (table, _, kv_lens) = _shape((NUM_PAGES, 4, PAGE_SIZE, 128)), _rows(num_rows)
    return Case(function=functools.partial(paged_gather, max_len=max_len), arguments=(pages, pages, table, kv_lens), is_kernel=False)


def _rotary_write(num_tokens: int, num_rows: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    pages, turns = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim)), _shape((num_tokens, head_dim // 2), np.float32)
    qkv = _shape((num_tokens, kv_heads, heads // kv_heads + 2, head_dim))
    return Case(function=rotary_kv_write, arguments=(qkv, *[turns] * 4, pages, pages, *_rows(num_rows)), donated=(5, 6))


def _write(num_tokens: int, num_rows: int, kv_heads: int, head_dim: int) -> Case:
    pages, new = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim)), _shape((num_tokens, kv_heads, head_dim))
    return Case(function=write_kv_pages, arguments=(new, new, pages, pages, *_rows(num_rows)), donated=(2, 3))


def _step(shape: str, num_tokens: int, num_rows: int, decode_only: bool) -> Case:
    """One engine step of a named shape in bfloat16, the state donated."""
    params, state, layout, statics = _model(SHAPES[shape], num_tokens, num_rows, decode_only)
    run = functools.partial(step, **statics)
    return Case(function=run, arguments=(params, state, _shape((layout.num_words,), np.int32)), donated=(1,), is_kernel=False)


def _shared_step(shape: str, num_rows: int, *, num_devices: int, num_layers: int) -> Case:
    """A decode step of the first layers of a named shape in bfloat16, each layer shared by the devices; the state donated."""
    config = _first_layers(shape, num_layers)
    params, state, layout, statics = _model(config, num_rows, num_rows, True)
    run = functools.partial(step, **{**statics, "graphdef": abstract_model(config.part(num_devices), "bfloat16")[0]})

    def shares(placement: Placement) -> tuple[Any, Any]:
        whole, state = placement.whole, placement.state
        return (tensor_parallel_shardings(config, placement.devices), state, whole), (whole, whole, state)

    return Case(function=run, arguments=(params, state, _shape((layout.num_words,), np.int32)), donated=(1,), is_kernel=False, shares=shares,
                num_devices=num_devices)


def _first_layers(shape: str, num_layers: int) -> ModelConfig:
    return dataclasses.replace(SHAPES[shape], num_layers=num_layers, sliding_windows=SHAPES[shape].sliding_windows[:num_layers])


def _burst(shape: str, num_rows: int, *, num_steps: int, num_layers: int) -> Case:
    """The loop over decode steps of the first layers of a named shape in bfloat16, the state donated."""
    params, state, layout, statics = _model(_first_layers(shape, num_layers), num_rows, num_rows, True)
    run = functools.partial(burst, step=functools.partial(step, **statics))
    return Case(function=run, arguments=(params, state, _shape((num_steps, layout.num_words), np.int32)), donated=(1,), is_kernel=False)


def _model(config: ModelConfig, num_tokens: int, num_rows: int,
           decode_only: bool) -> tuple[dict[str, Any], DeviceState, StepLayout, dict[str, Any]]:
    """Parameters and state in bfloat16, a bucket, and the static arguments of a step."""
    graphdef, specs = abstract_model(config, "bfloat16")
    params = {name: _shape(spec.shape, spec.dtype) for name, spec in specs.items()}
    layout = StepLayout(num_tokens=num_tokens, num_rows=num_rows, num_updates=num_tokens // PAGE_SIZE + 2 * num_rows, null_slot=SLOTS,
                        decode_only=decode_only)
    state = make_state(config, jax.ShapeDtypeStruct, max_num_seqs=SLOTS, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
                       num_pages_per_seq=MAX_MODEL_LEN // PAGE_SIZE, max_num_tokens=2048, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16)
    return params, state, layout, {"graphdef": graphdef, "layout": layout, "num_valid_tokens": config.vocab_size,
                                   "attention_implementation": None}
