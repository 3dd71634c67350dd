"""The collectives of a group that exchanges labelled rows in main memory, over any transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeflow.parallel.group import describe_rows


class Collectives(ABC):
    """The collectives of a `Group`, each as one labelled exchange of rows."""

    rank: int
    meanwhile: Callable[[], None] | None = None  # what runs between sending and waiting; None: nothing

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; see `Group`."""
        label = f"all_gather {name!r} of {describe_rows(tensor)}"
        return self._collect(label, [tensor.contiguous()], is_for_all=True, own=tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give each rank its part; see `Group`."""
        assert len({describe_rows(part) for part in parts}) == 1, "parts differ in their first dimension only"
        label = f"all_to_all {name!r} of {describe_rows(parts[0])}"
        return self._collect(label, [part.contiguous() for part in parts], is_for_all=False, own=parts[self.rank])

    def barrier(self, name: str) -> None:
        """Return when all ranks have arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._collect(f"barrier {name!r}", [nothing], is_for_all=True, own=nothing)

    @abstractmethod
    def _collect(self, label: str, parts: list[Tensor], *, is_for_all: bool, own: Tensor) -> list[Tensor]:
        """Give each rank its part, or the only one; return the parts of all ranks for this one, `own` among them."""
