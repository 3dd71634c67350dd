"""The columns of a matrix of activations, cut into a block for each rank: each computes its own, and all get all.

Columns are put side by side and never added up, so that the bits are those of one process that computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import torch
from moeflow.parallel.group import Group

if TYPE_CHECKING:
    from torch import Tensor


class Columns:
    """One rank's view."""

    def __init__(self, group: Group, name: str, blocks: Sequence[range]) -> None:
        """Take each rank's block. The blocks cover all columns in order. `name` is for errors."""
        self._group, self._name = group, name
        self._sizes = [len(block) for block in blocks]
        self.count = sum(self._sizes)
        self.own = blocks[group.rank]

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's columns. Shapes: x [T, count] -> [T, own]."""
        return x[:, self.own.start : self.own.stop].contiguous()

    def gather(self, own: Tensor) -> Tensor:
        """Return all columns. Shapes: own [T, own] -> [T, count]. Blocks until all ranks have arrived. Raises:
        GroupError.

        Every rank gives the same number of rows.
        """
        num_rows = own.shape[0]
        found = self._group.all_gather(self._name, own.reshape(-1))
        parts = [part.view(num_rows, size) for part, size in zip(found, self._sizes, strict=True)]
        return torch.cat(parts, dim=1)

    def scatter(self, own: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Return all columns of this rank's rows; `num_rows` counts the rows of each rank, in order.

        Shapes: own [T, own] -> [own T, count]. Blocks until all ranks have arrived. Raises: GroupError.
        """
        parts = [part.reshape(-1) for part in torch.split(own, list(num_rows))]
        found = self._group.all_to_all(self._name, parts)
        own_rows = num_rows[self._group.rank]
        return torch.cat([part.view(own_rows, size) for part, size in zip(found, self._sizes, strict=True)], dim=1)
