"""Dense inputs for tests of flash attention, a float64 numpy oracle and the error budget. Holds no test."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call; segments are runs of consecutive tokens (ids from 0, and -1 for what is left), the same for queries and keys from the end."""

    num_tokens: int
    num_keys: int
    num_rows: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "float32"
    kv_dtype: str | None = None
    causal: bool = True
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    segments: tuple[tuple[int, ...], ...] | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim ** -0.5

    def statics(self) -> dict[str, object]:
        return {"causal": self.causal, "scale": self.scale, "sliding_window": self.sliding_window, "softcap": self.softcap}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a call: the lengths and segment ids that the case has, None for the others."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_lengths: jax.Array | None
    kv_lengths: jax.Array | None
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None

    def arrays(self) -> tuple[jax.Array | None, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def make_inputs(case: Case) -> Inputs:
    """Random inputs; padding, by length and by segment, is NaN in all three arrays."""
    rng = np.random.default_rng(case.seed)
    q = rng.normal(size=(case.num_rows, case.num_tokens, case.num_heads, case.head_dim))
    k, v = rng.normal(size=(2, case.num_rows, case.num_keys, case.num_kv_heads, case.head_dim))
    q_ids = kv_ids = None
    if case.segments is not None:
        kv_ids = np.full((case.num_rows, case.num_keys), -1, np.int32)
        for b, lengths in enumerate(case.segments):
            kv_ids[b, :sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        q_ids = kv_ids[:, case.num_keys - case.num_tokens:]
        q[q_ids < 0], k[kv_ids < 0], v[kv_ids < 0] = np.nan, np.nan, np.nan
    for b in range(case.num_rows):
        q[b, (case.q_lengths or [case.num_tokens] * case.num_rows)[b]:] = np.nan
        for x in (k, v):
            x[b, (case.kv_lengths or [case.num_keys] * case.num_rows)[b]:] = np.nan
    integers = (None if x is None else jnp.asarray(x, jnp.int32) for x in (case.q_lengths, case.kv_lengths, q_ids, kv_ids))
    return Inputs(jnp.asarray(q, case.dtype), *(jnp.asarray(x, case.kv_dtype or case.dtype) for x in (k, v)), *integers)


def seen_keys(case: Case, inputs: Inputs, b: int, t: int) -> np.ndarray:
    """Numbers of the keys that a query sees, by the contract's words."""
    q_len = case.num_tokens if case.q_lengths is None else case.q_lengths[b]
    kv_len = case.num_keys if case.kv_lengths is None else case.kv_lengths[b]
    pos, keys = kv_len - q_len + t, np.arange(kv_len)
    if t >= q_len:
        return keys[:0]
    if case.causal:
        keys = keys[keys <= pos]
    if case.sliding_window is not None:
        keys = keys[keys > pos - case.sliding_window]
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        own = int(inputs.q_segment_ids[b, t])
        keys = keys[(np.asarray(inputs.kv_segment_ids)[b, keys] == own) & (own >= 0)]
    return keys


def dense_attention(case: Case, inputs: Inputs, dtype: str) -> np.ndarray:
    """Attention query by query, every operation rounded to `dtype`: float64 is the truth, the case's dtype the naive peer."""
    compute = np.dtype(jnp.dtype(dtype))
    wide = np.float64 if dtype == "float64" else np.float32  # in which a naive matmul accumulates
    q, k, v = (np.asarray(x).astype(compute).astype(wide) for x in (inputs.q, inputs.k, inputs.v))
    k, v = (np.repeat(x, case.num_heads // case.num_kv_heads, axis=2) for x in (k, v))
    out = np.zeros(q.shape, np.float64)
    for b in range(case.num_rows):
        for t in range(case.num_tokens):
            keys = seen_keys(case, inputs, b, t)
            if not keys.size:
                continue
            scores = np.einsum("nh,snh->ns", q[b, t], k[b, keys]).astype(compute) * compute.type(case.scale)
            if case.softcap is not None:
                scores = compute.type(case.softcap) * np.tanh(scores / compute.type(case.softcap))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = weights / weights.sum(-1, keepdims=True)
            out[b, t] = np.einsum("ns,snh->nh", weights.astype(wide), v[b, keys]).astype(compute)
    return out


def check_error_budget(case: Case, inputs: Inputs, out: jax.Array) -> None:
    """At most twice the naive same-precision error against float64, plus rounding of the result; no key, no value: exactly 0."""
    truth, got = dense_attention(case, inputs, "float64"), np.asarray(out).astype(np.float64)
    assert out.dtype == inputs.q.dtype and out.shape == inputs.q.shape
    lost = np.argwhere(~np.isfinite(got))
    assert not lost.size, f"NaN of padding reached {len(lost)} of {got.size} outputs, the first at [b, t, n, h] = {lost[0].tolist()}"
    blind = [(b, t) for b in range(case.num_rows) for t in range(case.num_tokens) if not seen_keys(case, inputs, b, t).size]
    assert all(np.all(got[b, t] == 0) for b, t in blind), "a query that sees no key must give 0"
    coarse = max((jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)), key=lambda d: float(jnp.finfo(d).eps))
    naive = np.abs(dense_attention(case, inputs, coarse.name) - truth).max()
    floor = 4 * float(jnp.finfo(case.dtype).eps) * np.abs(truth).max()
    error, where = np.abs(got - truth).max(), np.unravel_index(np.abs(got - truth).argmax(), got.shape)
    assert error <= 2 * naive + floor, (f"error {error:.3g} at [b, t, n, h] = {[int(i) for i in where]} (got {got[where]:.6g}, truth "
                                        f"{truth[where]:.6g}), budget {2 * naive + floor:.3g}: naive {naive:.3g}, floor {floor:.3g}")
