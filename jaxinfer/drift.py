"""How far a quantised model's hidden states and predictions are from the original's. Figures only: reads no file and advises nothing."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.load import LoadedModel
from jaxinfer.errors import CheckpointError, NonFiniteError
from jaxinfer.layers.attention import DenseContext
from jaxinfer.models.registry import bind

SHRUNK = 0.7
"""A layer whose standard deviation is below this share of the original's is flagged."""
STANDS_OUT = 3.0
"""A layer is flagged whose squared error grows by more than this many times the median layer's: independent errors add up in squares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFigures:
    """One stage's hidden state in both models, over all tokens and channels."""

    name: str
    """embedding, layer 0, ..., final norm."""
    mean: tuple[float, float]
    """Original, quantised."""
    std: tuple[float, float]
    kurtosis: tuple[float, float]
    """Fourth central moment over the squared variance; 3 for a normal distribution."""
    cosine: float
    """Mean over tokens."""
    relative_error: float
    """|difference| / |original|."""
    flags: tuple[str, ...] = ()
    """What is conspicuous about it."""


def moments(x: np.ndarray) -> tuple[float, float, float]:
    """(mean, standard deviation, kurtosis) of all entries, in float64; the kurtosis of a constant is 0."""
    wide = np.asarray(x, np.float64)
    mean = float(wide.mean())
    centred = (wide - mean) ** 2
    variance = float(centred.mean())
    return mean, math.sqrt(variance), float((centred**2).mean()) / variance**2 if variance > 0 else 0.0


def stage_figures(name: str, original: np.ndarray, quantised: np.ndarray) -> StageFigures:
    """Compares one stage's hidden states [tokens, D]."""
    pairs = list(zip(moments(original), moments(quantised), strict=True))
    a, b = np.asarray(original, np.float64), np.asarray(quantised, np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = float(np.mean(np.where(norms > 0, (a * b).sum(1) / np.where(norms > 0, norms, 1.0), 1.0)))
    norm = float(np.linalg.norm(a))
    return StageFigures(name=name, mean=pairs[0], std=pairs[1], kurtosis=pairs[2], cosine=cosine,
                        relative_error=float(np.linalg.norm(a - b)) / norm if norm > 0 else 0.0)


def flagged(stages: Sequence[StageFigures]) -> list[StageFigures]:
    """The stages with what is conspicuous about them said."""
    growth = [max(after.relative_error**2 - before.relative_error**2, 0.0) for before, after in zip(stages, stages[1:], strict=False)]
    typical = float(np.median(growth)) if growth else 0.0
    found = []
    for i, stage in enumerate(stages):
        said = []
        if stage.std[1] < SHRUNK * stage.std[0]:
            said.append(f"deviation shrank by {100 * (1 - stage.std[1] / stage.std[0]):.0f} %")
        if i and typical > 0 and growth[i - 1] > STANDS_OUT * typical and stage.name != "final norm":
            said.append(f"squared error grew {growth[i - 1] / typical:.1f} times as much as in the median layer")
        found.append(dataclasses.replace(stage, flags=tuple(said)))
    return found


def logit_figures(original: np.ndarray, quantised: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Sums over tokens that windows are averaged from.

    Args:
      original, quantised: float32 [T, V] logits.
      targets: [T] the tokens that come next.

    Returns:
      kl (original to quantised, nats), agree (of the likeliest token), the two negative log-likelihoods, and tokens.
    """
    p, q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x), axis=-1)) for x in (original, quantised))
    at = np.arange(len(targets))
    return {"kl": float((np.exp(p) * (p - q)).sum(dtype=np.float64)), "agree": float((p.argmax(-1) == q.argmax(-1)).sum()),
            "nll_original": -float(p[at, targets].sum(dtype=np.float64)), "nll_quantized": -float(q[at, targets].sum(dtype=np.float64)),
            "tokens": float(len(targets))}


def perplexity(what: str, total_nll: float, num_tokens: int) -> float:
    """exp of the mean negative log-likelihood, in nats, of `num_tokens` tokens.

    Raises:
      NonFiniteError: the mean is NaN, infinite, or beyond what exp of a float64 holds; `what` names the model.
    """
    mean = total_nll / num_tokens
    if not mean < math.log(np.finfo(np.float64).max):
        raise NonFiniteError(f"{what}: a token takes {mean:g} nats in the mean, which is no perplexity: its logits are not finite, or mean "
                             "nothing; look at python -m jaxinfer.diagnose, or run it in float32.")
    return math.exp(mean)


def diagnose(original: LoadedModel, quantised: LoadedModel, windows: np.ndarray) -> dict[str, Any]:
    """Runs both models over the windows, side by side, one window at a time.

    Args:
      original: the unquantised model.
      quantised: of the same config.
      windows: int32 [S, T].

    Returns:
      {"stages": [StageFigures], "kl_per_token", "top1_agreement", "perplexity": {"original", "quantized"}, "num_tokens"}; the stages'
      figures are means over the windows.

    Raises:
      CheckpointError: the two are not the same architecture with the same sizes.
      NonFiniteError: NaN or infinity in a stage, which is named with its model, or in a perplexity.
    """
    if (original.config.architecture, original.config.dim, original.config.num_layers, original.config.vocab_size) != (
            quantised.config.architecture, quantised.config.dim, quantised.config.num_layers, quantised.config.vocab_size):
        raise CheckpointError(f"{original.path} and {quantised.path} are different models: give a checkpoint and what was quantised from it.")
    per_window, totals = [], dict[str, float]()
    for ids in windows:
        figures = []
        for (name, x), (_, y) in zip(_stages(original, ids), _stages(quantised, ids), strict=True):
            _require_finite(name, {"original": x, "quantised": y})
            if name != "logits":
                figures.append(stage_figures(name, x, y))
                continue
            for key, value in logit_figures(x[:-1], y[:-1], ids[1:]).items():
                totals[key] = totals.get(key, 0.0) + value
        per_window.append(figures)
    count = totals["tokens"]
    return {"stages": flagged([_averaged(list(column)) for column in zip(*per_window, strict=True)]),
            "kl_per_token": totals["kl"] / count, "top1_agreement": totals["agree"] / count, "num_tokens": int(count),
            "perplexity": {"original": perplexity("the original", totals["nll_original"], int(count)),
                           "quantized": perplexity("the quantised model", totals["nll_quantized"], int(count))}}


def _require_finite(stage: str, values: Mapping[str, np.ndarray]) -> None:
    """Raises NonFiniteError for NaN or infinity in a stage of either model."""
    for model, x in values.items():
        if not np.isfinite(x).all():
            raise NonFiniteError(f"the {model} model meets NaN or infinity first in {stage}: try --dtype=float32; where that does not help, "
                                 f"{'convert' if model == 'original' else 'quantise'} it again.")


def _stages(model: LoadedModel, ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 values) of every stage for one window [T], then ("logits", [T, V]). Runs operation by operation, as they come."""
    module, length = bind(model.graphdef, model.params), jnp.asarray([len(ids)], jnp.int32)
    context, hidden = DenseContext(lengths=length, prompt_lens=length), jnp.zeros(())
    for name, hidden, _ in module.stages(jnp.asarray(ids, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32), context):
        yield name, np.asarray(hidden, np.float32)
    yield "logits", np.asarray(module.logits(hidden))


def _averaged(figures: list[StageFigures]) -> StageFigures:
    def mean(values: list[Any]) -> Any:
        return tuple(map(float, np.mean(values, axis=0))) if isinstance(values[0], tuple) else float(np.mean(values))

    names = ("mean", "std", "kurtosis", "cosine", "relative_error")
    return StageFigures(name=figures[0].name, **{name: mean([getattr(f, name) for f in figures]) for name in names})
