"""One layer by one method: from float32 parameters and input statistics to rounded linears. METHODS is where a method is added."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.formats.matrix import QuantizedMatrix
from convert.quantise import awq, folding
from convert.quantise.gptq import gptq
from convert.quantise.grid import GridSpec, Rounded, relative_error, round_nearest, round_shrunk, values
from convert.quantise.layer import LINEARS, InputStatistics, Params
from jaxinfer.errors import ConfigError, NonFiniteError
from jaxinfer.models.config import ModelConfig

COMPUTE_DTYPES = ("float32", "bfloat16")
AWQ_ROUNDINGS = ("feedback", "nearest")
DAMPING = {"awq": 0.1, "gptq": 0.01}
"""Where none is given. The usual 0.01 fits a few thousand calibration tokens closer and other text less well; but without awq's scales 0.1 is
little better for Qwen2.5-Coder-0.5B (perplexity +5.2 % for +5.8 %) and worse for SmolLM2 (+21.6 % for +15.2 %)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantiseConfig:
    """How a model is quantised."""

    method: str
    """A key of METHODS."""
    grid: GridSpec
    """Of every linear that is not kept at 8 bits."""
    awq_scaling: str = "auto"
    """A key of awq.SCALINGS."""
    awq_rounding: str = "feedback"
    """awq: how scaled weights are rounded: with gptq's error feedback, or to nearest as its paper does. Clipping before rounding to nearest
    made the MLP's outputs 0.7 to 1 % smaller in the three layers of Qwen2.5-Coder-0.5B that were looked at, and the model's predictions
    differ more from the original's (KL 0.0385 for 0.0354 without); with feedback 0.0249."""
    clip: bool = True
    """Whether awq also searches clipping."""
    damping: float | None = None
    """gptq, and awq with feedback: share of the Hessian's mean diagonal that is added to it. None: DAMPING."""
    act_order: bool = False
    """gptq: round the rows of the largest inputs first."""
    compute_dtype: str = "float32"
    """float32 or bfloat16: of the activations as they go through the layers. Sums, Gram matrices and searches are float32 always."""
    num_int8: int = 0
    """Linears of largest measured output error that are kept at 8 bits; vocabulary head and embedding are none of them."""
    lm_head_bits: int | None = None
    """Bits of the vocabulary head, 4 or 8, in the grid's groups; a head that is tied to the embedding becomes a copy of its own. None leaves
    it as it is."""
    embedding_bits: int | None = None
    """Bits of the embedding, and so of a head that stays tied to it; None leaves it as it is."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method = {self.method!r}: must be one of {', '.join(METHODS)}.")
        if self.awq_scaling not in awq.SCALINGS:
            raise ConfigError(f"awq_scaling = {self.awq_scaling!r}: must be one of {', '.join(awq.SCALINGS)}.")
        if self.awq_rounding not in AWQ_ROUNDINGS:
            raise ConfigError(f"awq_rounding = {self.awq_rounding!r}: must be one of {', '.join(AWQ_ROUNDINGS)}.")
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute_dtype = {self.compute_dtype!r}: must be one of {', '.join(COMPUTE_DTYPES)}.")
        if self.damping is not None and not 0 < self.damping < 100:
            raise ConfigError(f"damping = {self.damping}: must be above 0 and below 100.")
        if self.num_int8 < 0:
            raise ConfigError(f"keep_int8 = auto:{self.num_int8}: must be at least 0.")
        for name in ("lm_head_bits", "embedding_bits"):
            if getattr(self, name) not in (None, 4, 8):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be 4, 8 or None.")

    @property
    def used_damping(self) -> float:
        """The damping asked for, or the method's own."""
        return DAMPING[self.method] if self.damping is None else self.damping


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerResult:
    """A quantised layer, on the host."""

    matrices: dict[str, QuantizedMatrix]
    """Linear -> its rounded weight."""
    others: dict[str, np.ndarray]
    """Parameter path -> norms and biases, float32, with the scales folded in."""
    scales: dict[str, np.ndarray]
    """Linear -> the factor on its input rows that is in its weight, float32 [k]; empty where nothing was scaled."""
    errors: dict[str, float]
    """Linear -> |X dW|^2 / |X W|^2 over the calibration inputs."""
    facts: dict[str, dict[str, Any]]
    """Linear -> what a method tells beside: rule, ratio, losses, share of groups clipped."""


def flat(weight: jax.Array) -> jax.Array:
    """[in, *out] -> [k, n]."""
    return weight.reshape(weight.shape[0], -1)


@jax.jit
def descaled(gram: jax.Array, scale: jax.Array) -> jax.Array:
    """The Gram matrix of inputs divided by `scale`, as a weight with the scale folded in reads them."""
    return gram / (scale[:, None] * scale)


def _round_nearest(layer: str, params: Params, statistics: Mapping[str, InputStatistics], settings: QuantiseConfig, config: ModelConfig,
                   dtype: np.dtype) -> tuple[Params, folding.Scales, dict[str, Rounded], dict[str, dict[str, Any]]]:
    """Every weight to its nearest code."""
    rounded = {name: round_nearest(flat(params[f"{name}.weight"]), spec=settings.grid) for name in LINEARS}
    return params, {}, rounded, {name: {} for name in LINEARS}


def _gptq(layer: str, params: Params, statistics: Mapping[str, InputStatistics], settings: QuantiseConfig, config: ModelConfig,
          dtype: np.dtype) -> tuple[Params, folding.Scales, dict[str, Rounded], dict[str, dict[str, Any]]]:
    """Rounding with error feedback."""
    found = {name: gptq(f"{layer}.{name}", flat(params[f"{name}.weight"]), statistics[name].gram, spec=settings.grid,
                        damping=settings.used_damping, act_order=settings.act_order, clip=False) for name in LINEARS}
    return params, {}, {name: rounded for name, (rounded, _) in found.items()}, {name: {"damping": used} for name, (_, used) in found.items()}


def _awq(layer: str, params: Params, statistics: Mapping[str, InputStatistics], settings: QuantiseConfig, config: ModelConfig,
         dtype: np.dtype) -> tuple[Params, folding.Scales, dict[str, Rounded], dict[str, dict[str, Any]]]:
    """Scales for each linear's input, folded into what feeds it; then clipping, and rounding with error feedback or to nearest."""
    choices = {
        name: awq.search_scale(f"{layer}.{name}", flat(params[f"{name}.weight"]), statistics[name], settings.grid, settings.awq_scaling,
                               folding.tie(name, config))
        for name in LINEARS}
    norms, scales = folding.representable(params, {name: choice.scale for name, choice in choices.items()}, dtype=dtype)
    folded = folding.fold(params, norms, scales, config=config)
    rounded, facts = {}, {}
    for name, choice in choices.items():
        w, gram = flat(folded[f"{name}.weight"]), descaled(statistics[name].gram, scales[name])
        facts[name] = {"rule": choice.rule, "ratio": choice.ratio, "loss_with_scale": choice.loss, "loss_without_scale": choice.plain_loss,
                       "scale_min": float(scales[name].min()), "scale_max": float(scales[name].max())}
        if settings.awq_rounding == "feedback":
            rounded[name], used = gptq(f"{layer}.{name}", w, gram, spec=settings.grid, damping=settings.used_damping, act_order=False,
                                       clip=settings.clip)
            facts[name] |= {"damping": used}
        else:
            shrinks = _shrinks(w, gram, settings, folding.clippable_columns(name, config))
            rounded[name] = round_shrunk(w, shrinks, spec=settings.grid)
            facts[name] |= {"clipped_groups": float(jnp.mean(shrinks < 1.0))}
    return folded, scales, rounded, facts


def _shrinks(w: jax.Array, gram: jax.Array, settings: QuantiseConfig, mask: np.ndarray | None) -> jax.Array:
    """Factors on the groups' ranges for rounding to nearest, of the columns in `mask` (None: all): float32 [g, n], or a scalar 1."""
    if not settings.clip:
        return jnp.float32(1.0)
    shrinks = awq.search_clip(w, gram, spec=settings.grid)
    return shrinks if mask is None else jnp.where(jnp.asarray(mask), shrinks, 1.0)


METHODS: dict[str, Callable[..., tuple[Params, folding.Scales, dict[str, Rounded], dict[str, dict[str, Any]]]]] = {
    "awq": _awq, "gptq": _gptq, "rtn": _round_nearest}
"""Name -> (layer's name, params, statistics, settings, model, dtype of what stays unquantised) -> (params with scales folded in, the
scales, rounded linears, facts)."""


def round_alone(name: str, w: jax.Array, gram: jax.Array, settings: QuantiseConfig, spec: GridSpec) -> Rounded:
    """One matrix by the settings' method, without scales that something else would have to take back.

    Args:
      name: the linear, for errors.
      w: float32 [k, n].
      gram: of its inputs, float32 [k, k], mirrored.
      settings: method, damping, clipping.
      spec: the grid.
    """
    if settings.method == "rtn":
        return round_nearest(w, spec=spec)
    if settings.method == "awq" and settings.awq_rounding == "nearest":
        return round_shrunk(w, awq.search_clip(w, gram, spec=spec) if settings.clip else jnp.float32(1.0), spec=spec)
    clip = settings.method == "awq" and settings.clip
    return gptq(name, w, gram, spec=spec, damping=settings.used_damping, act_order=settings.act_order, clip=clip)[0]


def quantise_layer(layer: str, params: Params, statistics: Mapping[str, InputStatistics], settings: QuantiseConfig, config: ModelConfig,
                   dtype: np.dtype) -> LayerResult:
    """Quantises the four linears of a layer.

    Args:
      layer: its name, for errors.
      params: float32.
      statistics: of each linear's inputs, mirrored.
      settings: method and grid.
      config: the model.
      dtype: of the checkpoint's unquantised parameters.

    Raises:
      NonFiniteError: weights, activations or results that are not finite; names the linear.
    """
    for name in LINEARS:
        if not bool(jnp.isfinite(statistics[name].gram).all()):
            raise NonFiniteError(f"{layer}.{name}: its calibration activations are NaN, infinite or too large to square in float32: nothing "
                                 "is saved; check the checkpoint with python -m convert --verify, or calibrate on other text.")
        if not bool(jnp.isfinite(params[f"{name}.weight"]).all()):
            raise NonFiniteError(f"{layer}.{name}: its weights are not finite: nothing is saved; convert the model again.")
    folded, scales, rounded, facts = METHODS[settings.method](layer, params, statistics, settings, config, dtype)
    matrices, errors = {}, {}
    for name in LINEARS:
        scale = scales.get(name)
        gram = statistics[name].gram if scale is None else descaled(statistics[name].gram, scale)
        errors[name] = float(relative_error(values(rounded[name]), flat(folded[f"{name}.weight"]), gram))
        matrices[name] = rounded[name].matrix(settings.grid)
        matrices[name].check(f"{layer}.{name}")
        if not np.isfinite(errors[name]):
            raise NonFiniteError(f"{layer}.{name}: its output error is {errors[name]}: nothing is saved; calibrate on other text.")
    others = {path: np.asarray(value) for path, value in folded.items() if path.removesuffix(".weight") not in LINEARS}
    return LayerResult(matrices=matrices, others=others, scales={name: np.asarray(scale) for name, scale in scales.items()}, errors=errors,
                       facts=facts)
