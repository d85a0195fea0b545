"""What the engine measures about itself. Host arithmetic only."""

import dataclasses
import time
from collections.abc import Sequence

from jaxinfer.engine.placement import device_nbytes
from jaxinfer.models.config import ModelConfig
from jaxinfer.scheduler.plan import SchedulePlan


@dataclasses.dataclass(kw_only=True)
class EngineMetrics:
    """Sums since the engine started, or since the last reset()."""

    decode_read_bytes: int
    """Weight bytes that one decode step must read."""
    kv_token_bytes: int
    """Bytes of one token's keys and values over all layers."""
    read_bytes_per_s: float | None
    """Memory bandwidth that decode is measured against."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_decode_steps: int = 0
    """Steps in which every row had one token, but for the first after a pause: those that the rates below cover, each from the end of the
    steps before."""
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_bytes: int = 0
    host_seconds: float = 0.0
    """Host time spent scheduling, packing and dispatching, without waiting for the device."""
    _last_end: float | None = None

    def reset(self) -> None:
        """Starts the sums anew."""
        fixed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.default is dataclasses.MISSING}
        self.__dict__.update(type(self)(**fixed).__dict__)

    def record(self, plans: Sequence[SchedulePlan], num_sampled: int) -> None:
        """Takes in steps whose tokens the host has read together: one, or those of a burst, which share their time.

        Args:
          plans: in order.
          num_sampled: tokens of theirs that somebody still wanted.
        """
        now = time.perf_counter()
        self.num_steps += len(plans)
        self.num_prefill_tokens += sum(plan.num_prefill_tokens for plan in plans)
        self.num_output_tokens += num_sampled
        if self._last_end is not None and all(plan.is_decode_only for plan in plans):
            self.num_decode_steps += len(plans)
            self.num_decode_tokens += num_sampled
            self.decode_seconds += now - self._last_end
            self.decode_bytes += sum(self.decode_read_bytes + self.kv_token_bytes * sum(r.start + 1 for r in plan.rows) for plan in plans)
        self._last_end = now

    def pause(self) -> None:
        """The engine has nothing to do for anybody: the time until the end of the next step is nobody's."""
        self._last_end = None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.num_decode_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def roofline_share(self) -> float | None:
        """Bytes that decode had to read over the time it took, as a share of the device's bandwidth."""
        if not self.decode_seconds or self.read_bytes_per_s is None:
            return None
        return self.decode_bytes / self.decode_seconds / self.read_bytes_per_s


def decode_read_bytes(params: dict, model: ModelConfig) -> int:
    """Bytes of weights that a decode step reads on each device: all but an untied input embedding, of which it takes single rows."""
    return sum(device_nbytes(x) for path, x in params.items() if model.tie_embeddings or not path.startswith("embedding."))
