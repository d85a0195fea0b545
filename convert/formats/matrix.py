"""One quantised matrix, however a file packs it: what every reader of convert/formats makes and every writer takes. Numpy only.

    weight[perm[i], j] = (q[i, j] - zeros[g, j]) * float32(scales[g, j])        g = i // group_size; without perm, i in its place
"""

import dataclasses

import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.quant import QuantFormat, check_groups


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """A weight matrix with K inputs and n outputs in groups along K. Row i of `q` belongs to group i // group_size."""

    q: np.ndarray
    """[K, n] uint8, each below 2**bits."""
    scales: np.ndarray
    """[K / group_size, n] float16, bfloat16 or float32, finite and not negative; 0 for a group whose weights are all zero."""
    zeros: np.ndarray | None
    """[K / group_size, n] uint8, the value of q that stands for 0; None is 2**(bits - 1) everywhere."""
    bits: int
    """4 or 8."""
    group_size: int | None
    """Rows of `q` that share a scale; None is all of them (one group)."""
    perm: np.ndarray | None
    """[K] int32: row i of `q` multiplies input perm[i]; None where that is i."""

    @property
    def format(self) -> QuantFormat:
        """How the matrix is held, as the model's config states it."""
        return QuantFormat(bits=self.bits, group_size=self.group_size, zero_point=self.zeros is not None,
                           permuted=self.perm is not None, scales_dtype=self.scales.dtype.name)

    def dequantized(self) -> np.ndarray:
        """[K, n] float32 with the inputs in the model's order: exactly (q - z) * float32(scale), never rounded to 16 bits."""
        groups = self.q.reshape(self.scales.shape[0], -1, self.q.shape[1]).astype(np.float32)  # [groups, group_size, n]
        zeros = np.float32(2**(self.bits - 1)) if self.zeros is None else self.zeros.astype(np.float32)[:, None]
        weight = ((groups - zeros) * self.scales.astype(np.float32)[:, None]).reshape(self.q.shape)
        if self.perm is None:
            return weight
        out = np.empty_like(weight)
        out[self.perm] = weight
        return out

    def check(self, name: str) -> None:
        """Refuses what must never be saved.

        Args:
          name: the module, for the message.

        Raises:
          CheckpointError: shapes that do not fit each other, groups that do not divide K, values of q or zeros beyond the bits, a
            scale that is not finite or negative, or a `perm` that is no permutation.
        """
        check_groups(name, self.q.shape[0], self.format.group_size)
        limit, grid = 2**self.bits, (self.q.shape[0] // (self.group_size or self.q.shape[0]), self.q.shape[1])
        if self.q.dtype != np.uint8 or self.scales.shape != grid or self.zeros is not None and (self.zeros.shape, self.zeros.dtype) != (
                grid, np.uint8):
            raise CheckpointError(f"{name}: q {self.q.dtype}{list(self.q.shape)} in groups of {self.group_size} needs scales and zeros "
                                  f"{list(grid)}, found {list(self.scales.shape)} and "
                                  f"{None if self.zeros is None else list(self.zeros.shape)}: quantise it again")
        if self.bits == 4 and int(self.q.max(initial=0)) >= limit or self.zeros is not None and int(self.zeros.max(initial=0)) >= limit:
            raise CheckpointError(f"{name}: quantised values or zero points of {limit} or more, which {self.bits} bits cannot hold: "
                                  "quantise it again")
        wide = self.scales.astype(np.float32)
        if not np.isfinite(wide).all() or (wide < 0).any():
            bad = wide[~np.isfinite(wide) | (wide < 0)]
            raise CheckpointError(f"{name}: {bad.size} scales are NaN, infinite or negative (the first is {bad[0]}): nothing is saved; "
                                  "quantise this layer again with a larger group or clipping off, or leave it unquantised")
        if self.perm is not None and not np.array_equal(np.sort(self.perm), np.arange(self.q.shape[0])):
            raise CheckpointError(f"{name}: perm is no permutation of its {self.q.shape[0]} inputs: quantise it again")
