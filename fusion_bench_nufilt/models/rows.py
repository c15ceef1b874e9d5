"""A tensor whose rows are matched with the base's, where the order or the tokens differ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .source import Source


@dataclass(frozen=True)
class MatchedRows:
    """A tensor with the base's rows, given where a source stores each of them."""

    source: Source
    key: str
    width: int  # of a row, in elements
    stored: list[int]  # for each row of the base, the row in the source, or -1 to take the base's

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of the flattened tensor, given those of the base's."""
        # Each reading opens the file: rows that follow each other in both models are read at once.
        pieces = []
        end = start
        while end < stop:
            first = end
            row = first // self.width
            end = min(stop, self._end_of_run(row, -(-stop // self.width)) * self.width)
            if self.stored[row] < 0:
                pieces.append(theta_0[first - start : end - start])
            else:
                shift = (self.stored[row] - row) * self.width
                piece = self.source.elements(self.key, first + shift, end + shift)
                pieces.append(piece.to(theta_0.device))
        return torch.cat(pieces)

    def _end_of_run(self, row: int, limit: int) -> int:
        """Return the row after the last one, below a limit, that is read together with a row."""
        first = self.stored[row]
        end = row + 1
        while end < limit:
            follows = self.stored[end] == first + end - row
            if first < 0:
                follows = self.stored[end] < 0
            if not follows:
                break
            end += 1
        return end
