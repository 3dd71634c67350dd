"""A group of processes on any machines, each with an encrypted link to each other.

Sending does not wait for the other ranks, so that no order of sizes can make two ranks wait for each other. Waiting
ranks notice at once a rank that ends, since its links end. Heartbeats end the link to a rank that is stopped or
unreachable. A rank that hangs is noticed by the timeout.

It does not use torch.distributed: any process that reaches the ports of gloo and its rendezvous could take part without
authentication.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.parallel.collectives import Collectives
from moeflow.parallel.group import describe_rows
from moeflow.parallel.patience import Patience
from moeflow.parallel.tcp.link import Kind, Link, Message


class TcpGroup(Collectives):
    """The `Group` of a process that is linked to all others. Tensors are in main memory."""

    def __init__(self, rank: int, links: Mapping[int, Link], timeout_s: float, whole: TcpGroup | None = None) -> None:
        """Join as `rank`; `links` of one endpoint lead to all others. A subgroup of `whole` uses its links."""
        self.rank = rank
        self.size = len(links) + 1
        self._links = links
        self._patience = Patience(timeout_s)
        self._whole = whole
        self._abort_reason: str | None = None

    def subgroup(self, ranks: Sequence[int]) -> TcpGroup:
        """Return the group of some ranks; see `Group`."""
        links = {number: self._links[rank] for number, rank in enumerate(ranks) if rank != self.rank}
        return TcpGroup(ranks.index(self.rank), links, self._patience.limit_s, self._whole or self)

    def channel(self, rank: int) -> TcpChannel:
        """Return a channel to a rank; see `Group`."""
        return TcpChannel(self, rank)

    def abort(self, reason: str) -> None:
        """End the group; see `Group`."""
        if self._whole is not None:
            self._whole.abort(reason)
        elif self._abort_reason is None:
            self._abort_reason = reason
            for link in self._links.values():
                link.say_farewell(reason)

    def close(self) -> None:
        """End the links: nothing else may be called afterwards."""
        for link in self._links.values():
            link.close()

    def exchange(self, label: str, parts: Mapping[int, Tensor], sources: Collection[int], like: Tensor) -> list[Tensor]:
        """Send each of some ranks its part, and return what each of some others has for this one, as rows of `like`.

        Whatever goes wrong ends the group, because this rank is no longer where the others are.
        """
        try:
            self._patience.begin()
            found = self._exchange(label, parts, sources, like)
            self._patience.end()
        except BaseException as error:
            reason = (self._whole or self)._abort_reason
            if reason is not None and isinstance(error, GroupError):
                raise GroupError(f"the group ended before {label} did: {reason}") from None
            self.abort(str(error) or type(error).__name__)
            raise
        return found

    def _collect(self, label: str, parts: list[Tensor], *, is_for_all: bool, own: Tensor) -> list[Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self.exchange(label, {rank: parts[0 if is_for_all else rank] for rank in others}, others, own)
        return [*found[: self.rank], own, *found[self.rank :]]

    def _exchange(
        self, label: str, parts: Mapping[int, Tensor], sources: Collection[int], like: Tensor
    ) -> list[Tensor]:
        if (reason := (self._whole or self)._abort_reason) is not None:
            raise GroupError(reason)
        for rank, part in parts.items():
            self._links[rank].send(Kind.COLLECTIVE, label, _bytes_of(part))
        if self.meanwhile is not None:
            self.meanwhile()
        waiting = {rank: self._links[rank] for rank in sources}
        found: dict[int, Tensor] = {}
        deadline_s = time.monotonic() + self._patience.limit_s
        while waiting:
            self._wait(label, waiting, deadline_s)
            try:
                for rank, link in list(waiting.items()):
                    if (message := link.take()) is not None:
                        found[rank] = self._rows_of(message, link, label, like)
                        del waiting[rank]
            except GroupError as error:
                raise GroupError(f"{label} failed: {error}") from None
        return [found[rank] for rank in sources]

    def _wait(self, label: str, waiting: Mapping[int, Link], deadline_s: float) -> None:
        """Wait until a link has something."""
        links = tuple(waiting.values())
        left_s = deadline_s - time.monotonic()
        if not links[0].endpoint.wait(lambda: any(link.is_ready for link in links), left_s):
            who = ", ".join(link.peer for link in links)
            raise GroupError(
                f"{label} failed: {who} did not come to it within {self._patience.limit_s:g} s: a process is stopped "
                "or much slower than this one, or the network between is cut"
            )

    def _rows_of(self, message: Message, link: Link, label: str, like: Tensor) -> Tensor:
        """Return another rank's part, in rows like those of `like`. Raises: GroupError if it is not expected."""
        if (message.kind, message.label) != (Kind.COLLECTIVE, label):
            both = f"rank {self.rank} is at {label}; {link.peer} is at {message.label}"
            raise GroupError(f"ranks do different things: {both}")
        rest = like.shape[1:]
        row_bytes = rest.numel() * like.itemsize
        if message.num_bytes % row_bytes:
            raise GroupError(f"{link.peer} sends {message.num_bytes} bytes, no rows of {row_bytes}")
        tensor = torch.empty((message.num_bytes // row_bytes, *rest), dtype=like.dtype)
        message.copy_to(_bytes_of(tensor))
        return tensor


class TcpChannel:
    """The `Channel` to one rank of a group. Sending returns at once."""

    def __init__(self, group: TcpGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def send(self, name: str, tensor: Tensor) -> None:
        """Give the other rank a tensor; see `Channel`."""
        label = f"{name!r} of {describe_rows(tensor)}"
        self._group.exchange(label, {self._rank: tensor.contiguous()}, (), tensor)

    def receive(self, name: str, like: Tensor) -> Tensor:
        """Return what the other rank sends; see `Channel`."""
        (found,) = self._group.exchange(f"{name!r} of {describe_rows(like)}", {}, (self._rank,), like)
        return found


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
