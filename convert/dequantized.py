"""A quantised folder seen as one with float32 weights, for `--verify`: the same names, each weight exactly (q - z) * float32(scale)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convert.formats import Scheme, TensorSpec
from convert.mapping import Part
from convert.quantized import read_matrix
from convert.source import Source, TensorInfo


class DequantizedSource:
    """A convert.source.Source around a quantised one. The matrix read last is kept, since its rows are asked for block by block.

    Args:
      source: the quantised folder.
      scheme: how it is quantised.
      packed: weight -> the tensors that stand for it (convert/quantized.py).
      shapes: weight -> [out, in].
    """

    def __init__(self, source: Source, scheme: Scheme, packed: Mapping[str, Mapping[str, TensorSpec]],
                 shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._source, self._scheme, self._packed = source, scheme, packed
        self._last: tuple[str, np.ndarray] | None = None
        self.kind, self.path, self.files = source.kind, source.path, source.files
        self.config, self.generation_config, self.natural_dtype = source.config, source.generation_config, source.natural_dtype
        parts = {name for specs in packed.values() for name in specs}
        self.tensors: Mapping[str, TensorInfo] = {name: info for name, info in source.tensors.items() if name not in parts} | {
            name: TensorInfo(name=name, origin=name, shape=shapes[name], dtype="F32", num_bytes=4 * shapes[name][0] * shapes[name][1],
                             is_float=True) for name in packed}

    @property
    def exact(self) -> frozenset[str]:
        """The weights that are used as they are, whatever dtype the model has."""
        return frozenset(self._packed)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor; of a quantised weight, float32."""
        if name not in self._packed:
            return self._source.read_rows(name, start, stop)
        if self._last is None or self._last[0] != name:
            matrix = read_matrix(self._source, self._scheme, Part(name, "transposed"), self._packed[name])
            self._last = name, matrix.dequantized().T
        return self._last[1][start:stop]

    def write_tokenizer(self, folder: Path) -> frozenset[int]:
        """As the folder itself."""
        return self._source.write_tokenizer(folder)
