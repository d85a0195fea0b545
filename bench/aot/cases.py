"""What is compiled: each kernel at its named shapes and at its edges, and whole decode and prefill steps. Makes no arrays, only shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine import page_moves
from jaxinfer.engine import step as steps
from jaxinfer.engine.executables import NUM_PAGE_COPIES
from jaxinfer.engine.fresh_state import make_state
from jaxinfer.engine.load import tensor_parallel_shardings
from jaxinfer.engine.placement import Placement
from jaxinfer.engine.step import burst, step
from jaxinfer.layers.forced import NOTHING_FORCED
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import abstract_model
from jaxinfer.models.shapes import SHAPES, quantized
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
LONGEST = 131072  # tokens of a long context
SLOTS = 32        # more where a step has more rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A function and the shapes that it is compiled for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    kernels: tuple[str, ...]
    """Parts of names: for each, one of our kernels must be in the program, or XLA does what it is for."""
    is_step: bool = False
    """A whole step runs in a command buffer."""
    shares: Callable[[Placement], tuple[Any, Any]] | None = None
    """Of a program that devices run on their shares: the shardings of its arguments and of its results."""
    num_devices: int = 1


def all_cases() -> dict[str, Callable[[], Case]]:
    """Name -> maker of the case; made lazily, since tracing reads the target. The name of a case that is one kernel begins with kernel-.

    Steps have all their layers, bursts, steps over two GPUs and steps of quantised weights have four: what they must not do, copy a pool or
    make temporaries that a step does not make, shows in any.
    """
    cases: dict[str, Callable[[], Case]] = {}
    for name, heads, kv_heads, head_dim in (("q", 28, 4, 128), ("m", 32, 32, 128), ("h64", 14, 2, 64)):
        for rows in (1, 32, 128):
            cases[f"kernel-decode-{name}-b{rows}"] = functools.partial(_attention, rows, rows, heads, kv_heads, head_dim, 1)
        cases[f"kernel-prefill-{name}-t2048"] = functools.partial(_attention, 2048, 8, heads, kv_heads, head_dim, None)
        cases[f"kernel-rotary-write-{name}-t32"] = functools.partial(_rotary_write, 32, 32, heads, kv_heads, head_dim)
        cases[f"kernel-rotary-write-{name}-t2048"] = functools.partial(_rotary_write, 2048, 8, heads, kv_heads, head_dim)
    cases |= _writes() | _edges() | _dense() | _int4() | _page_moves()
    for shape in ("Q", "M"):
        for rows in (8, 32):
            cases[f"step-decode-{shape.lower()}-b{rows}"] = functools.partial(_step, SHAPES[shape], rows, rows, True)
        cases[f"step-prefill-{shape.lower()}-t2048"] = functools.partial(_step, SHAPES[shape], 2048, 8, False)
    cases["step-decode-q-b128"] = functools.partial(_step, SHAPES["Q"], 128, 128, True)
    cases["step-decode-q-b8-2gpus"] = functools.partial(_shared_step, _first_layers("Q", 4), 8, num_devices=2)
    cases["burst-decode-q-b8"] = functools.partial(_burst, _first_layers("Q", 4), 8, num_steps=8)
    few = quantized(_first_layers("Q", 4), "int4")
    for rows, kernel in ((1, "int4_matmul_stream"), (8, "int4_matmul"), (32, "int4_matmul")):
        cases[f"step-decode-q-int4-b{rows}"] = functools.partial(_step, few, rows, rows, True, kernels=(kernel,))
    cases["step-prefill-q-int4-t2048"] = functools.partial(_step, few, 2048, 8, False)
    cases["burst-decode-q-int4-b8"] = functools.partial(_burst, few, 8, num_steps=8, kernels=("int4_matmul",))
    return cases


def _writes() -> dict[str, Callable[[], Case]]:
    """Keys and values into pages: by our kernel, and by XLA's scatters, which take what needs a cast and must be in place too."""
    return {
        "kernel-write-q-t32": functools.partial(_write, 32, 32, 4, 128),
        "kernel-write-q-t1024": functools.partial(_write, 1024, 8, 4, 128),
        "kernel-write-q-t4096": functools.partial(_write, 4096, 1, 4, 128),
        "kernel-write-m-t32": functools.partial(_write, 32, 32, 32, 128),
        "kernel-write-m-t128": functools.partial(_write, 128, 128, 32, 128),
        "kernel-write-m-t4096": functools.partial(_write, 4096, 1, 32, 128),
        "kernel-write-h64-t2048": functools.partial(_write, 2048, 8, 2, 64),
        "kernel-write-h80-f16-t33": functools.partial(_write, 33, 2, 1, 80, dtype=jnp.float16),
        "pages-write-m-t2048": functools.partial(_write, 2048, 8, 32, 128, implementation="xla"),
    }


def _edges() -> dict[str, Callable[[], Case]]:
    """Calls beyond the named shapes: page sizes, long contexts, windows, caps, float16, the sm_80 prefill kernel on sm_90; writes; norms."""
    decode = functools.partial(_attention, 8, 8, 8, 8, 128, 1)
    prefill = functools.partial(_attention, 512, 4, 8, 2, 128, None)
    decode_64 = functools.partial(_attention, 8, 8, 14, 2, 64, 1)
    prefill_64 = functools.partial(_attention, 512, 4, 8, 2, 64, None, implementation="mosaic")
    return {
        "kernel-decode-page16": functools.partial(decode, page_size=16),
        "kernel-prefill-page16": functools.partial(prefill, page_size=16),
        "kernel-decode-h64-page16": functools.partial(decode_64, page_size=16),
        "kernel-decode-h64-page48": functools.partial(decode_64, page_size=48),
        "kernel-prefill-h64-page16": functools.partial(prefill_64, page_size=16),
        "kernel-prefill-h64-page48": functools.partial(prefill_64, page_size=48),
        "kernel-decode-page32-window": functools.partial(decode, page_size=32, sliding_window=1000),
        "kernel-decode-page96-softcap": functools.partial(decode, page_size=96, softcap=30.0),
        "kernel-decode-page128": functools.partial(decode, page_size=128),
        "kernel-decode-f16": functools.partial(decode, dtype=jnp.float16),
        "kernel-decode-longest-b1": functools.partial(_attention, 1, 1, 28, 4, 128, 1, max_model_len=32768),
        "kernel-decode-kv131072-b1": functools.partial(_attention, 1, 1, 28, 4, 128, 1, max_model_len=LONGEST),
        "kernel-prefill-kv131072-t2048": functools.partial(_attention, 2048, 1, 28, 4, 128, None, max_model_len=LONGEST),
        "kernel-prefill-page32-window": functools.partial(prefill, page_size=32, sliding_window=1000),
        "kernel-prefill-page96-softcap": functools.partial(prefill, page_size=96, softcap=30.0),
        "kernel-prefill-page128-f16": functools.partial(prefill, page_size=128, dtype=jnp.float16),
        "kernel-prefill-mosaic-window": functools.partial(prefill_64, sliding_window=1000),
        "kernel-rotary-write-m-t4096": functools.partial(_rotary_write, 4096, 1, 32, 32, 128),
        "kernel-rotary-write-h16-t33": functools.partial(_rotary_write, 33, 2, 4, 2, 16),
        "kernel-rotary-write-h80-f16-t33": functools.partial(_rotary_write, 33, 2, 8, 1, 80, dtype=jnp.float16),
        "kernel-norm-d3584-residual": functools.partial(_norm, 128, 3584, True),
        "kernel-norm-d3584-9-parts": functools.partial(_norm, 32, 3584, True, num_parts=9),
        "kernel-norm-d896": functools.partial(_norm, 8, 896, False),
        "kernel-norm-d4096": functools.partial(_norm, 8, 4096, False),
        "kernel-norm-d4096-t4096-residual": functools.partial(_norm, 4096, 4096, True),
    }


def _dense() -> dict[str, Callable[[], Case]]:
    """Flash attention at both head dims and all masks, and pages that are copied or gathered."""
    return {
        "kernel-flash-h64-causal-odd": functools.partial(_flash, 1023, 64, causal=True),
        "kernel-flash-h128-causal": functools.partial(_flash, 1024, 128, causal=True),
        "kernel-flash-h64-f16": functools.partial(_flash, 1024, 64, causal=True, dtype=jnp.float16),
        "kernel-flash-h64-segments-softcap": functools.partial(_flash, 999, 64, segments=True, causal=False, softcap=30.0),
        "kernel-flash-h128-window-mosaic": functools.partial(_flash, 1001, 128, lengths=True, causal=True, sliding_window=300,
                                                             implementation="mosaic"),
        "pages-copy-u16": functools.partial(_copy_pages, 16),
        "pages-gather-b8": functools.partial(_gather, 8, 999),
    }


def _int4() -> dict[str, Callable[[], Case]]:
    """The product of few tokens and of more with the matrices of shapes Q and M; then each form of weights, and many tokens."""
    def of(m: int, k: int, n: int, **form: Any) -> Callable[[], Case]:
        return functools.partial(_int4_matmul, m, k, n, **form)

    matrices = {"qkv": (3584, 4608), "o": (3584, 3584), "gate-up": (3584, 37888), "down": (18944, 3584),
                "m-qkv": (4096, 12288), "m-o": (4096, 4096), "m-gate-up": (4096, 22016), "m-down": (11008, 4096)}
    tokens = {"qkv": (8, 16, 64), "o": (8, 64), "gate-up": (8, 16, 32, 64, 128, 256), "down": (8, 64, 128, 256), "m-qkv": (8,), "m-o": (8,),
              "m-gate-up": (8,), "m-down": (8, 64)}
    cases = {f"kernel-int4-{name}-t{m}": of(m, *matrices[name]) for name, ms in tokens.items() for m in ms}
    one = functools.partial(of, 1, kernels=("int4_matmul_stream",))
    cases |= {f"kernel-int4-{name}-t1": one(*matrices[name]) for name in ("qkv", "o", "down", "m-qkv", "m-down")}
    cases |= {f"kernel-int4-{name}-swiglu-t1": one(*matrices[name], activation="swiglu") for name in ("gate-up", "m-gate-up")}
    cases |= {
        "kernel-int4-group64-t1": one(3584, 4608, group_size=64),
        "kernel-int4-group64-swiglu-t1": one(3072, 16384, group_size=64, activation="swiglu"),
        "kernel-int4-symmetric-column-bias-t1": one(3584, 4608, group_size=3584, zeros=False, bias=True),
        "kernel-int4-f16-t1": one(3584, 4608, dtype=jnp.float16),
    }
    for m in (8, 64):
        cases |= {
            f"kernel-int4-group64-t{m}": of(m, 3584, 4608, group_size=64),
            f"kernel-int4-column-t{m}": of(m, 3584, 4608, group_size=3584),
            f"kernel-int4-symmetric-t{m}": of(m, 3584, 4608, zeros=False),
            f"kernel-int4-bias-t{m}": of(m, 3584, 4608, bias=True),
        }
    return cases | {
        "kernel-int4-group32-t8": of(8, 3584, 4608, group_size=32),
        "kernel-int4-group32-t128": of(128, 3584, 4608, group_size=32),
        "kernel-int4-group64-gate-up-t32": of(32, 3584, 37888, group_size=64),
        "kernel-int8-f16-t8": of(8, 3584, 4608, bits=8, dtype=jnp.float16),
        "kernel-int8-gate-up-t8": of(8, 3584, 37888, bits=8),
        "kernel-int8-gate-up-t64": of(64, 3584, 37888, bits=8),
        "kernel-int8-head-t64": of(64, 3584, 152064, bits=8, group_size=64),
        "kernel-int4-dequantize-down-t2048": of(2048, 18944, 3584, kernels=("int4_dequantize",)),
    }


def _page_moves() -> dict[str, Callable[[], Case]]:
    """What the engine does with pages over all layers of shape Q: copies them, saves them to the host, loads them from there."""
    return {
        "pages-copy-q": functools.partial(_copy_state_pages, SHAPES["Q"]),
        "pages-save-q": functools.partial(_save_pages, SHAPES["Q"]),
        "pages-load-q": functools.partial(_load_pages, SHAPES["Q"]),
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
    return Case(function=run, arguments=(_shape((num_tokens, heads, head_dim), dtype), pages, pages, *rows), kernels=("attention",))


def _norm(num_tokens: int, width: int, residual: bool, *, num_parts: int = 0) -> Case:
    x = _shape((num_tokens, width))
    parts = _shape((num_parts, num_tokens, width), jnp.float32) if num_parts else x
    return Case(function=functools.partial(rms_norm, eps=1e-6, implementation="mosaic"),
                arguments=(parts, _shape((width,)), *([x] if residual else [])), kernels=("rms_norm",))


def _flash(length: int, head_dim: int, *, lengths: bool = False, segments: bool = False, dtype: Any = jnp.bfloat16, **statics: Any) -> Case:
    """Two rows of `length` queries and keys, 8 heads over 2 KV heads."""
    integers = {name: _shape((2,), np.int32) for name in ("q_lengths", "kv_lengths") if lengths}
    integers |= {name: _shape((2, length), np.int32) for name in ("q_segment_ids", "kv_segment_ids") if segments}

    def run(q: jax.Array, k: jax.Array, v: jax.Array, integers: dict[str, Any]) -> jax.Array:
        return flash_attention(q, k, v, scale=head_dim ** -0.5, **integers, **statics)

    kv = _shape((2, length, 2, head_dim), dtype)
    return Case(function=run, arguments=(_shape((2, length, 8, head_dim), dtype), kv, kv, integers), kernels=("attention",))


def _int4_matmul(m: int, k: int, n: int, *, bits: int = 4, group_size: int = 128, zeros: bool = True, bias: bool = False,
                 dtype: Any = jnp.bfloat16, activation: str | None = None, kernels: tuple[str, ...] = ("int4_matmul",)) -> Case:
    groups = (k // group_size, n)

    def run(x: jax.Array, packed: jax.Array, scales: jax.Array, zeros: jax.Array | None, bias: jax.Array | None) -> jax.Array:
        return int4_matmul(x, packed, scales, zeros, bias=bias, group_size=group_size, bits=bits, activation=activation)

    return Case(function=run, kernels=kernels, arguments=(
        _shape((m, k), dtype), _shape(packed_shape(k, n, bits=bits), np.int16), _shape(groups, jnp.float16),
        _shape(groups) if zeros else None, _shape((n,), dtype) if bias else None))


def _copy_pages(num_copies: int) -> Case:
    pools = [_shape((NUM_PAGES, 4, PAGE_SIZE, 128))] * 4
    return Case(function=copy_pages, arguments=(pools, *[_shape((num_copies,), np.int32)] * 2), donated=(0,), kernels=())


def _copy_state_pages(config: ModelConfig) -> Case:
    """The engine's copies within the pools of all layers, which stay in place."""
    pages = _shape((NUM_PAGE_COPIES,), np.int32)
    return Case(function=steps.copy_pages, arguments=(_state(config, SLOTS), pages, pages), donated=(0,), kernels=())


def _save_pages(config: ModelConfig) -> Case:
    pages = _shape((page_moves.NUM_PAGES_MOVED,), np.int32)
    return Case(function=page_moves.read_pages, arguments=(_state(config, SLOTS).cache, pages), kernels=())


def _load_pages(config: ModelConfig) -> Case:
    pages = _shape((page_moves.NUM_PAGES_MOVED,), np.int32)
    rows = _shape((page_moves.NUM_PAGES_MOVED, 2, config.num_layers, config.num_kv_heads, PAGE_SIZE, config.head_dim))
    return Case(function=page_moves.write_pages, arguments=(_state(config, SLOTS), pages, rows), donated=(0,), kernels=())


def _gather(num_rows: int, max_len: int) -> Case:
    pages, (table, _, kv_lens) = _shape((NUM_PAGES, 4, PAGE_SIZE, 128)), _rows(num_rows)
    return Case(function=functools.partial(paged_gather, max_len=max_len), arguments=(pages, pages, table, kv_lens), kernels=())


def _rotary_write(num_tokens: int, num_rows: int, heads: int, kv_heads: int, head_dim: int, *, dtype: Any = jnp.bfloat16) -> Case:
    pages, turns = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim), dtype), _shape((num_tokens, head_dim // 2), np.float32)
    qkv = _shape((num_tokens, kv_heads, heads // kv_heads + 2, head_dim), dtype)
    return Case(function=rotary_kv_write, arguments=(qkv, *[turns] * 4, pages, pages, *_rows(num_rows)), donated=(5, 6),
                kernels=("rotary_kv_write",))


def _write(num_tokens: int, num_rows: int, kv_heads: int, head_dim: int, *, dtype: Any = jnp.bfloat16,
           implementation: str = "mosaic") -> Case:
    pages, new = _shape((NUM_PAGES, kv_heads, PAGE_SIZE, head_dim), dtype), _shape((num_tokens, kv_heads, head_dim), dtype)
    return Case(function=functools.partial(write_kv_pages, implementation=implementation),
                arguments=(new, new, pages, pages, *_rows(num_rows)), donated=(2, 3),
                kernels=("write_kv_pages",) if implementation == "mosaic" else ())


def _step(config: ModelConfig, num_tokens: int, num_rows: int, decode_only: bool, *, kernels: tuple[str, ...] = ()) -> Case:
    """One engine step in bfloat16, the state donated; `kernels` are those beside attention and the write."""
    params, state, layout, statics = _model(config, num_tokens, num_rows, decode_only)
    return _step_case(functools.partial(step, **statics), (params, state, _shape((layout.num_words,), np.int32)), kernels)


def _shared_step(config: ModelConfig, num_rows: int, *, num_devices: int) -> Case:
    """A decode step in bfloat16, each layer shared by the devices; the state donated."""
    params, state, layout, statics = _model(config, num_rows, num_rows, True)
    run = functools.partial(step, **{**statics, "graphdef": abstract_model(config.part(num_devices), "bfloat16")[0]})

    def shares(placement: Placement) -> tuple[Any, Any]:
        whole, state = placement.whole, placement.state
        return (tensor_parallel_shardings(config, placement.devices), state, whole), (whole, whole, state)

    return _step_case(run, (params, state, _shape((layout.num_words,), np.int32)), (), shares=shares, num_devices=num_devices)


def _burst(config: ModelConfig, num_rows: int, *, num_steps: int, kernels: tuple[str, ...] = ()) -> Case:
    """The loop over decode steps in bfloat16, the state donated."""
    params, state, layout, statics = _model(config, num_rows, num_rows, True)
    run = functools.partial(burst, step=functools.partial(step, **statics))
    return _step_case(run, (params, state, _shape((num_steps, layout.num_words), np.int32)), kernels)


def _step_case(function: Callable[..., Any], arguments: tuple[Any, ...], kernels: tuple[str, ...], **sharing: Any) -> Case:
    return Case(function=function, arguments=arguments, donated=(1,), kernels=("attention", "rotary_kv_write", *kernels), is_step=True,
                **sharing)


def _first_layers(shape: str, num_layers: int) -> ModelConfig:
    return dataclasses.replace(SHAPES[shape], num_layers=num_layers, sliding_windows=SHAPES[shape].sliding_windows[:num_layers])


def _model(config: ModelConfig, num_tokens: int, num_rows: int,
           decode_only: bool) -> tuple[dict[str, Any], DeviceState, StepLayout, dict[str, Any]]:
    """Parameters and state in bfloat16, a bucket, and the static arguments of a step."""
    graphdef, specs = abstract_model(config, "bfloat16")
    params = {name: _shape(spec.shape, spec.dtype) for name, spec in specs.items()}
    slots = max(SLOTS, num_rows)
    layout = StepLayout(num_tokens=num_tokens, num_rows=num_rows, num_updates=num_tokens // PAGE_SIZE + 2 * num_rows, null_slot=slots,
                        decode_only=decode_only)
    return params, _state(config, slots), layout, {"graphdef": graphdef, "layout": layout, "num_valid_tokens": config.vocab_size,
                                                   "forced": NOTHING_FORCED}


def _state(config: ModelConfig, slots: int) -> DeviceState:
    return make_state(config, jax.ShapeDtypeStruct, max_num_seqs=slots, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
                      num_pages_per_seq=MAX_MODEL_LEN // PAGE_SIZE, max_num_tokens=2048, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16)
