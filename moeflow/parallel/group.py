"""What a rank can do with the others of its group: collectives, which all ranks call in the same order.

Ranks run the same program from the same inputs, so they agree on the next collective and its contents without
communication. If they disagree, or one is late or gone, ranks that notice raise a `GroupError`. Then the group has
ended for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Channel(Protocol):
    """What this rank and another one exchange alone: one sends, the other receives, in the same order."""

    def send(self, name: str, tensor: Tensor) -> None:
        """Give the other rank a tensor [N, ...]. Blocks: perhaps until it receives. Raises: GroupError."""

    def receive(self, name: str, like: Tensor) -> Tensor:
        """Return what the other rank sends under this name.

        Shapes: [N, ...]; N is free, the other dimensions are those of `like`. Blocks: until it is there.
        Raises: GroupError if the other rank has ended, sends something else or nothing in time, or after an `abort`.
        """


class Group(Protocol):
    """One rank's view of its group. One collective at a time; `name` describes its contents, equally on all ranks.

    Every collective waits for all ranks. Raises: GroupError after an `abort`, or if a rank has ended, calls another
    collective or does not arrive within the group's `timeout_s`.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks by rank; this rank's is `tensor` itself.

        Shapes: [N_rank, ...] -> size x [N_r, ...]; N may differ and be 0, dtype and all other dimensions may not.
        """

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give `parts[r]` to each rank r, and return what each has for this one; from itself it is the part itself.

        Shapes: size x [N, ...] -> size x [N, ...]; N may differ and be 0, dtype and all other dimensions may not.
        """

    def barrier(self, name: str) -> None:
        """Return when all ranks have arrived."""

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Return the group of some of the ranks, ascending, this one among them; in it they count from 0.

        It ends when this one does, and the other way round. A subgroup in shared memory must have been created with its
        group.
        """

    def channel(self, rank: int) -> Channel:
        """Return a channel to another rank. In shared memory the two must be one of its subgroups."""

    def abort(self, reason: str) -> None:
        """End the group: what others wait for raises at once, and so does all that comes. From any thread."""

    def close(self) -> None:
        """Give the memory back. The other ranks are not told: see `abort`."""


class OverlappingGroup(Group, Protocol):
    """A group whose collectives run a callback between sending and waiting."""

    meanwhile: Callable[[], None] | None  # None: nothing

    def subgroup(self, ranks: Sequence[int]) -> OverlappingGroup:
        """See `Group`."""


class Sums(Protocol):
    """Ranks whose devices add up what each of them has."""

    def all_reduce(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, perhaps in the place of `tensor`. Raises: GroupError."""


def describe_rows(tensor: Tensor) -> str:
    """Return what tensors of one collective have in common: they are rows of the same kind, in main memory."""
    assert tensor.is_cpu, "processes exchange what is in main memory"
    assert tensor.dim() > 0, "there are rows"
    assert tensor.shape[1:].numel() > 0, "rows of nothing could not be counted"
    return f"{tensor.dtype} [*{''.join(f', {size}' for size in tensor.shape[1:])}]"
