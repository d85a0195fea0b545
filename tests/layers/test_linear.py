"""The one matrix product: layouts, rounding, and the padded single row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.embedding import Embedding, QuantizedEmbedding
from jaxinfer.layers.linear import Linear, matmul, vocab_matmul
from jaxinfer.layers.mlp import SwiGLU
from jaxinfer.quant import FORMATS, QuantFormat


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_matmul_accumulates_in_float32_and_rounds_once(dtype, rows):
    x, weight, bias = arrays(dtype, (rows, 24), (24, 2, 3, 4), (2, 3, 4))
    want = np.einsum("td,dabc->tabc", *(np.asarray(a).astype(np.float64) for a in (x, weight))) + np.asarray(bias, np.float64)
    got = matmul(x, weight, bias=bias)
    assert got.dtype == dtype and got.shape == (rows, 2, 3, 4)
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=float(jnp.finfo(dtype).eps), atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_vocab_matmul_stays_in_float32(rows):
    x, weight = arrays(jnp.bfloat16, (rows, 32), (50, 32))
    got = vocab_matmul(x, weight)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, rtol=1e-5, atol=1e-5)


def quantized_table(quant, dim, vocab_size, dtype):
    """(module, its weight [D, V] float32 from the definition)."""
    rng, module = np.random.default_rng(0), QuantizedEmbedding(vocab_size, dim, dtype=dtype, quant=quant)
    groups = 1 if quant.group_size is None else dim // quant.group_size
    q, zeros = rng.integers(0, 2**quant.bits, (dim, vocab_size), dtype=np.uint8), rng.integers(0, 2**quant.bits, (groups, vocab_size))
    scales, perm = rng.random((groups, vocab_size)).astype(np.float16), rng.permutation(dim).astype(np.int32)
    values = {"packed": FORMATS[quant.name].pack(q), "scales": scales, "zeros": jnp.asarray(zeros, jnp.bfloat16), "perm": perm}
    for name, value in values.items():
        if hasattr(module, name):
            setattr(module, name, getattr(module, name).replace(jnp.asarray(value)))
    weight, rows = np.empty((dim, vocab_size), np.float32), dim // groups
    middle = np.repeat(zeros, rows, 0) if quant.zero_point else 2**(quant.bits - 1)
    weight[perm if quant.permuted else np.arange(dim)] = (q.astype(np.float32) - middle) * np.repeat(scales.astype(np.float32), rows, 0)
    return module, weight


TABLES = [QuantFormat(bits=4, group_size=32, zero_point=True, permuted=False, scales_dtype="float16"),
          QuantFormat(bits=8, group_size=None, zero_point=False, permuted=True, scales_dtype="float16")]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab_size", [50, 130])
@pytest.mark.parametrize("quant", TABLES, ids=str)
def test_a_quantised_head_stays_in_float32_and_pads_the_vocabulary(dtype, rows, vocab_size, quant):
    """Against float64 with the dequantised weight, which the product rounds once to x's dtype; no tile of 64 tokens is full."""
    head, weight = quantized_table(quant, 64, vocab_size, dtype)
    x = arrays(dtype, (rows, 64))[0]
    got = head.logits(x)
    assert got.dtype == jnp.float32 and got.shape == (rows, vocab_size)
    want = np.asarray(x, np.float64) @ np.asarray(jnp.asarray(weight, dtype), np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("dim", "vocab_size"), [(64, 50), (320, 130)])
@pytest.mark.parametrize("quant", TABLES, ids=str)
def test_a_quantised_embedding_looks_up_what_its_columns_are(dtype, dim, vocab_size, quant):
    """Bit for bit the dequantised columns, rounded once; tokens repeat, fill more than one tile, and are the last ones too."""
    table, weight = quantized_table(quant, dim, vocab_size, dtype)
    ids = np.array([vocab_size - 1, 0, 7, 7, *np.random.default_rng(1).integers(0, vocab_size, 70)], np.int32)
    for asked in (ids, ids[:1]):
        got = jax.jit(type(table).__call__)(table, jnp.asarray(asked))
        assert got.dtype == dtype and got.shape == (len(asked), dim)
        np.testing.assert_array_equal(got, jnp.asarray(weight.T[asked]).astype(dtype))
    assert np.isfinite(np.asarray(table(jnp.asarray([-1, vocab_size, 2**31 - 1], jnp.int32)), np.float32)).all()  # of padding: some row


@pytest.mark.parametrize("product", [lambda x, w: matmul(x, w), lambda x, w: vocab_matmul(x, w.T)])
def test_a_single_bfloat16_row_equals_the_same_row_among_two(product):
    x, weight = arrays(jnp.bfloat16, (2, 64), (64, 96))
    alone = jax.jit(product)(x[:1], weight)
    np.testing.assert_array_equal(alone, jax.jit(product)(x, weight)[:1])


def test_few_16_bit_rows_are_padded_to_what_each_backend_is_fast_at():
    x, weight = arrays(jnp.bfloat16, (1, 64), (64, 96))
    traced = jax.jit(matmul).trace(x, weight)
    assert "tensor<2x64xbf16>" in traced.lower(lowering_platforms=("cpu",)).as_text()
    gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<8x64xbf16>" in gpu and "tensor<2x64xbf16>" not in gpu
    assert "conditional" not in jax.jit(matmul).lower(x, weight).compile().as_text()


def test_float32_products_ask_for_full_precision():
    x, weight = arrays(jnp.float32, (2, 8), (8, 8))
    assert "HIGHEST" in jax.jit(matmul).lower(x, weight).as_text()


def test_linear_bias_is_there_only_where_asked():
    with_bias = Linear(4, (2, 3), axes=(None, "mlp", None), bias=True, dtype=jnp.float32)
    assert with_bias.bias is not None and with_bias.bias.shape == (2, 3)
    with_bias.bias = with_bias.bias.replace(jnp.ones((2, 3)))
    np.testing.assert_array_equal(with_bias(jnp.zeros((1, 4))), np.ones((1, 2, 3)))
    assert Linear(4, (6,), axes=(None, None), bias=False, dtype=jnp.float32).bias is None


def test_swiglu_formula():
    x, gate_up, down = arrays(jnp.float32, (3, 8), (8, 2, 12), (12, 8))
    mlp = SwiGLU(8, 12, dtype=jnp.float32)
    mlp.gate_up.weight, mlp.down.weight = mlp.gate_up.weight.replace(gate_up), mlp.down.weight.replace(down)
    gate, up = np.asarray(x) @ np.asarray(gate_up[:, 0]), np.asarray(x) @ np.asarray(gate_up[:, 1])
    np.testing.assert_allclose(mlp(x), (gate / (1 + np.exp(-gate)) * up) @ np.asarray(down), rtol=1e-4, atol=1e-4)


def test_embedding_serves_as_table_and_head():
    table = Embedding(10, 4, dtype=jnp.float32)
    table.weight = table.weight.replace(jnp.arange(40, dtype=jnp.float32).reshape(10, 4))
    np.testing.assert_array_equal(table(jnp.array([3, 0])), [[12, 13, 14, 15], [0, 1, 2, 3]])
    np.testing.assert_array_equal(table.logits(jnp.eye(4)[:1]), np.arange(0, 40, 4)[None])
