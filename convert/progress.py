"""What a conversion shows as it runs: a bar on a terminal, lines elsewhere. Also measures peak anonymous memory. Changes nothing else."""

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

LINE_INTERVAL_S = 5.0
BAR_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.02
BAR_WIDTH = 24


class Progress:
    """Tensors and bytes done out of a known total, with speed and time left."""

    def __init__(self, num_tensors: int, num_bytes: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._total = num_tensors, num_bytes
        self._done = 0, 0
        self._stream = stream or sys.stderr
        self._enabled, self._is_terminal = enabled, self._stream.isatty()
        self._start = time.monotonic()
        self._shown = self._start if not self._is_terminal else 0.0

    def advance(self, num_bytes: int) -> None:
        """Counts one tensor of this size as done."""
        self._done = self._done[0] + 1, self._done[1] + num_bytes
        now = time.monotonic()
        if self._enabled and (now - self._shown >= (BAR_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S)):
            self._shown = now
            self._stream.write(("\r\x1b[K" if self._is_terminal else "") + self._line(now) + ("" if self._is_terminal else "\n"))
            self._stream.flush()

    def close(self) -> None:
        """Clears the bar."""
        if self._enabled and self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        tensors, num_bytes = self._done
        share = num_bytes / max(1, self._total[1])
        speed = num_bytes / max(1e-9, now - self._start)
        left_s = (self._total[1] - num_bytes) / max(1.0, speed)
        filled = round(BAR_WIDTH * share)
        return (f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%}  {tensors}/{self._total[0]} tensors  "
                f"{speed / 1e6:.0f} MB/s  {left_s:.0f} s left")


class MemoryMeter:
    """Samples this process's anonymous resident memory (RssAnon: mapped files do not count) and keeps its peak.

    A context manager. `peak_bytes` is None where the system does not report it.
    """

    def __init__(self) -> None:
        self.peak_bytes = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-meter", daemon=True)

    def __str__(self) -> str:
        return "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 1e6:.0f} MB"

    def __enter__(self) -> "MemoryMeter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while self.peak_bytes is not None and not self._stop.wait(SAMPLE_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes() or 0)


def anonymous_bytes() -> int | None:
    """RssAnon of this process, None where /proc does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
