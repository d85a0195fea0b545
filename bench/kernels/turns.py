"""Several processes on one GPU: memory that they share, and turns, of which one process at a time has one. Measures nothing."""

import contextlib
import fcntl
import os
from collections.abc import Iterator


def share_memory() -> None:
    """Has this process, and those that it starts, take GPU memory as they need it. To be called before jax looks at its devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@contextlib.contextmanager
def turn(lock: str) -> Iterator[None]:
    """Holds the lock, a file; waits for whoever has it. A process that ends, however it ends, gives its turn back."""
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
