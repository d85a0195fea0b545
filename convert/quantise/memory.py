"""How much memory a quantisation takes, said before it begins, and refused where the machine has less. Measures and allocates nothing."""

import dataclasses

from convert.progress import anonymous_bytes
from convert.quantise.layer import batch_rows, input_widths, output_widths
from convert.quantise.vocabulary import STRIP
from jaxinfer.errors import CapacityError
from jaxinfer.models.config import ModelConfig

RUNTIME_BYTES = 512 << 20
"""Compiler, tokenizer and allocator, beside what the process holds when it begins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by what holds them; the last three never stand at once."""

    runtime: int
    """What the process holds already, and what compiling adds."""
    windows: int
    """The calibration windows on their way through the layers, float32 [S, T, D]."""
    layer: int
    """A layer's parameters as stored, in float32, and with scales folded in."""
    batch: int
    """A batch's activations and attention scores."""
    grams: int
    """The Gram matrices of a layer's four inputs."""
    search: int
    """Copies of the widest weight and of its Gram matrix in a search."""
    evaluation: int
    """Embedding or vocabulary head in float32, rounded tables' codes, and a window's logits, for perplexity."""
    vocabulary: int
    """Vocabulary head or embedding as stored, their codes, one's twice, and what rounding a strip takes."""

    @property
    def peak(self) -> int:
        """The most at one time."""
        return self.runtime + self.windows + max(self.layer + self.grams + max(self.batch, self.search), self.layer + self.batch,
                                                 self.evaluation, self.vocabulary)

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name) / 1e6:.0f}" for field in dataclasses.fields(self))
        return f"peak {self.peak / 1e9:.2f} GB at most ({parts} MB)"


def plan_memory(config: ModelConfig, *, method: str, num_tables: int, num_samples: int, max_len: int) -> MemoryPlan:
    """The plan for calibrating a model with S windows of T tokens.

    Args:
      config: the model.
      method: a key of METHODS; gptq and awq factor Gram matrices, in float64 where they must, and awq rescales them first.
      num_tables: how many of vocabulary head and embedding are quantised too.
      num_samples: S, the larger of calibration's and evaluation's.
      max_len: T.
    """
    inputs, outputs = input_widths(config), output_widths(config)
    rows = min(num_samples, batch_rows(max_len))
    tokens = rows * max_len
    weights = sum(inputs[name] * outputs[name] for name in inputs)
    widest = max(inputs[name] * outputs[name] for name in inputs)
    largest_gram = max(inputs.values())**2
    activations = tokens * (8 * config.dim + 3 * outputs["attention.qkv"] + 3 * outputs["mlp.gate_up"])
    table, factors = config.vocab_size * config.dim, {"awq": 52, "gptq": 48, "rtn": 16}[method]
    scores = 3 * rows * config.num_heads * max_len**2
    return MemoryPlan(
        runtime=RUNTIME_BYTES + (anonymous_bytes() or 0), windows=4 * num_samples * max_len * config.dim, layer=12 * weights,
        batch=4 * (activations + scores), grams=4 * sum(k * k for k in inputs.values()),
        search=24 * widest + factors * largest_gram,
        evaluation=(8 + num_tables) * table + 16 * max_len * config.vocab_size,
        vocabulary=0 if num_tables == 0 else (
            (5 + num_tables) * table + 24 * min(STRIP, config.vocab_size) * config.dim + factors * config.dim**2))


def require_memory(plan: MemoryPlan, available: int | None) -> None:
    """Raises CapacityError where less memory is free than the plan adds to what the process holds already."""
    needed = plan.peak - (anonymous_bytes() or 0)
    if available is not None and available < needed:
        raise CapacityError(f"calibration takes {needed / 1e9:.2f} GB of memory beside what is held already ({plan}); {available / 1e9:.2f} GB "
                            "are free: lower --num_samples or --max_len, or use a larger machine.")


def available_bytes() -> int | None:
    """MemAvailable, None where /proc does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
