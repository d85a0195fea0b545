"""Ragged paged inputs for tests, a float64 numpy oracle and the error budget. Holds no test."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Target

CPU = Target(platform="cpu", compute_capability=None, device_kind="cpu")
A100 = Target(platform="gpu", compute_capability=(8, 0), device_kind="NVIDIA A100-SXM4-40GB")
H200 = Target(platform="gpu", compute_capability=(9, 0), device_kind="NVIDIA H200")
ON_SM_80 = os.environ.get("JAXINFER_TEST_ARCH") == "80"  # whatever the GPU, see conftest.py
INTERPRETED = dataclasses.replace(A100 if ON_SM_80 else H200, interpret=jax.default_backend() != "gpu")  # on a GPU its kernels run natively
REFUSED_HERE = {"wgmma"} if ON_SM_80 else set()
TARGETS = {"cpu": CPU, "gpu": H200, "interpreted": INTERPRETED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call: rows as (new tokens, tokens in the cache with them) and everything static."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    num_padding: int = 0
    spare_entries: int = 1
    max_q_len: int | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim ** -0.5

    def statics(self) -> dict[str, object]:
        return {"scale": self.scale, "max_q_len": self.max_q_len, "sliding_window": self.sliding_window, "softcap": self.softcap}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a call, and the rows' dense keys and values they were cut from."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    dense_k: list[np.ndarray]  # per row [S, K, H] float64
    dense_v: list[np.ndarray]

    def arrays(self) -> tuple[jax.Array, ...]:
        return self.q, self.k_pages, self.v_pages, self.page_table, self.cu_q_lens, self.kv_lens


def make_inputs(case: Case, *, num_entries: int | None = None) -> Inputs:
    """Random inputs; every slot that holds no token of a row is NaN, the null page and the pages of nobody included."""
    rng = np.random.default_rng(case.seed)
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    page_counts = [-(-kv_len // case.page_size) for _, kv_len in case.rows]
    num_entries = num_entries or max(page_counts) + case.spare_entries
    num_pages = sum(page_counts) + 4
    pages = iter(rng.permutation(num_pages - 1) + 1)
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
    page_table = np.zeros((len(case.rows), num_entries), np.int32)
    dense: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for b, (_, kv_len) in enumerate(case.rows):
        page_table[b, :page_counts[b]] = [next(pages) for _ in range(page_counts[b])]
        for out, pool in zip(dense, (k_pages, v_pages), strict=True):
            row = rng.normal(size=(kv_len, case.num_kv_heads, case.head_dim)).astype(kv_dtype).astype(np.float64)
            out.append(row)
            for s in range(kv_len):
                pool[page_table[b, s // case.page_size], :, s % case.page_size] = row[s]
    q_lens = [q_len for q_len, _ in case.rows]
    q = rng.normal(size=(sum(q_lens) + case.num_padding, case.num_heads, case.head_dim))
    q[sum(q_lens):] = np.nan
    return Inputs(jnp.asarray(q, case.dtype), jnp.asarray(k_pages, kv_dtype), jnp.asarray(v_pages, kv_dtype), jnp.asarray(page_table),
                  jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32), jnp.asarray([n for _, n in case.rows], jnp.int32), *dense)


def dense_attention(case: Case, inputs: Inputs, dtype: str = "float64") -> np.ndarray:
    """Attention row by row without pages, every operation rounded to `dtype`: float64 is the truth, the case's dtype the naive peer."""
    compute = np.dtype(jnp.dtype(dtype))
    q = np.asarray(inputs.q).astype(compute)
    out = np.zeros(q.shape, np.float64)
    start = 0
    for b, (q_len, kv_len) in enumerate(case.rows):
        k, v = (np.repeat(x[b].astype(compute), case.num_heads // case.num_kv_heads, axis=1) for x in (inputs.dense_k, inputs.dense_v))
        for t in range(q_len):
            pos = kv_len - q_len + t
            first = 0 if case.sliding_window is None else max(0, pos + 1 - case.sliding_window)
            keys, values = k[first:pos + 1], v[first:pos + 1]
            scores = (np.einsum("nh,snh->ns", q[start + t].astype(_wide(compute)), keys.astype(_wide(compute))).astype(compute)
                      * compute.type(case.scale))
            if case.softcap is not None:
                scores = compute.type(case.softcap) * np.tanh(scores / compute.type(case.softcap))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = weights / weights.sum(-1, keepdims=True)
            out[start + t] = np.einsum("ns,snh->nh", weights.astype(_wide(compute)), values.astype(_wide(compute))).astype(compute)
        start += q_len
    return out


def _wide(dtype: np.dtype) -> np.dtype:
    """Dtype in which a naive matmul accumulates."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_error_budget(case: Case, inputs: Inputs, out: jax.Array) -> None:
    """At most twice the naive same-precision error against float64, plus rounding of the result; padding exactly 0.

    Truth and naive peer are numpy on the host, so that the budget is the same on every device.
    """
    truth, got = dense_attention(case, inputs), np.asarray(out).astype(np.float64)
    num_valid = sum(q_len for q_len, _ in case.rows)
    assert out.dtype == inputs.q.dtype and out.shape == inputs.q.shape
    assert np.all(got[num_valid:] == 0), "padding tokens must give 0"
    lost = np.argwhere(~np.isfinite(got))
    assert not lost.size, f"NaN of unused slots reached {len(lost)} of {got.size} outputs, the first at [t, n, h] = {lost[0].tolist()}"
    coarse = min((jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)), key=lambda d: -float(jnp.finfo(d).eps))
    naive = np.abs(dense_attention(case, inputs, coarse.name) - truth).max(initial=0)
    floor = 4 * float(jnp.finfo(case.dtype).eps) * np.abs(truth).max(initial=0)
    error = np.abs(got - truth).max(initial=0)
    where = np.unravel_index(np.abs(got - truth).argmax(), got.shape)
    assert error <= 2 * naive + floor, (f"error {error:.3g} at [t, n, h] = {[int(i) for i in where]} (got {got[where]:.6g}, truth "
                                        f"{truth[where]:.6g}), budget {2 * naive + floor:.3g}: naive {naive:.3g}, floor {floor:.3g}")
