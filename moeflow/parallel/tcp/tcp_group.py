"""A group of processes on any machines, each with an authenticated TCP connection to each other.

All frames of a collective are sent and received concurrently, without blocking, so that no order of sizes can make two
ranks wait for each other. Waiting ranks notice at once a rank that ends, since its connections close. A rank that hangs
or is unreachable is noticed by the timeout.

It does not use torch.distributed: any process that reaches the ports of gloo and its rendezvous could take part without
authentication.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.parallel.collectives import Collectives
from moeflow.parallel.group import describe_rows
from moeflow.parallel.tcp.frames import FrameHead, Kind
from moeflow.parallel.tcp.tcp_link import TcpLink

_MAX_PART_BYTES: Final = 4 << 30  # of a tensor of another rank: far beyond what a pass has


class TcpGroup(Collectives):
    """The `Group` of a process that is linked to all others. Tensors are in main memory."""

    def __init__(
        self, rank: int, links: Mapping[int, TcpLink], timeout_s: float, whole: TcpGroup | None = None
    ) -> None:
        """Join as `rank`; `links` lead to all others. A subgroup uses links of a `whole`, and ends with it."""
        self.rank = rank
        self.size = len(links) + 1
        self._links = links
        self._timeout_s = timeout_s
        self._whole = whole
        self._abort_reason: str | None = None

    def subgroup(self, ranks: Sequence[int]) -> TcpGroup:
        """Return the group of some ranks; see `Group`."""
        links = {number: self._links[rank] for number, rank in enumerate(ranks) if rank != self.rank}
        return TcpGroup(ranks.index(self.rank), links, self._timeout_s, self._whole or self)

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
        """Close the connections: nothing else may be called afterwards."""
        for link in self._links.values():
            link.close()

    def exchange(self, label: str, parts: Mapping[int, Tensor], sources: Collection[int], like: Tensor) -> list[Tensor]:
        """Send each of some ranks its part, and return what each of some others has for this one, as rows of `like`.

        Whatever goes wrong ends the group, because this rank is no longer where the others are.
        """
        try:
            return self._exchange(label, parts, sources, like)
        except BaseException as error:
            reason = (self._whole or self)._abort_reason
            if reason is not None and isinstance(error, GroupError):
                raise GroupError(f"the group ended before {label} did: {reason}") from None
            self.abort(str(error) or type(error).__name__)
            raise

    def _collect(self, label: str, parts: list[Tensor], *, is_for_all: bool, own: Tensor) -> list[Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self.exchange(label, {rank: parts[0 if is_for_all else rank] for rank in others}, others, own)
        return [*found[: self.rank], own, *found[self.rank :]]

    def _exchange(
        self, label: str, parts: Mapping[int, Tensor], sources: Collection[int], like: Tensor
    ) -> list[Tensor]:
        if (reason := (self._whole or self)._abort_reason) is not None:
            raise GroupError(reason)
        incoming = {rank: _Incoming(self.rank, self._links[rank], label, like) for rank in sources}
        sending = {rank: self._links[rank] for rank in parts}
        receiving = {rank: self._links[rank] for rank in sources}
        for rank, link in sending.items():
            link.start_sending(Kind.COLLECTIVE, label, _bytes_of(parts[rank]))
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                sending = {rank: link for rank, link in sending.items() if not link.push()}
                receiving = {rank: link for rank, link in receiving.items() if not link.pull(incoming[rank].open)}
            except GroupError as error:
                raise GroupError(f"{label} failed: {error}") from None
            if not sending and not receiving:
                return [incoming[rank].tensor for rank in sources]
            self._wait(label, sending, receiving, deadline_s)

    def _wait(
        self, label: str, sending: Mapping[int, TcpLink], receiving: Mapping[int, TcpLink], deadline_s: float
    ) -> None:
        """Wait until a link has something, or takes something."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            late = receiving or sending
            who = ", ".join(link.peer for link in late.values())
            raise GroupError(
                f"{label} failed: {who} did not come to it within {self._timeout_s:g} s: a process is stopped or much "
                "slower than this one, or the network between is cut"
            )
        poll = select.poll()
        for rank, link in self._links.items():
            events = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
            if events:
                poll.register(link, events)
        poll.poll(left_s * 1000 + 1)


class TcpChannel:
    """The `Channel` to one rank of a group. Sending returns as soon as the kernel has all bytes."""

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


class _Incoming:
    """What another rank has for this one."""

    def __init__(self, rank: int, link: TcpLink, label: str, own: Tensor) -> None:
        """Expect it as `rank`, in rows like those of `own`."""
        self._rank, self._link, self._label, self._own = rank, link, label, own
        self.tensor = own  # until there is another

    def open(self, head: FrameHead) -> memoryview:
        """Return the memory for it, if it is what this rank expects. Raises: GroupError if not."""
        if (head.kind, head.label) != (Kind.COLLECTIVE, self._label):
            both = f"rank {self._rank} is at {self._label}; {self._link.peer} is at {head.label}"
            raise GroupError(f"ranks do different things: {both}")
        rest = self._own.shape[1:]
        row_bytes = rest.numel() * self._own.itemsize
        if head.num_bytes % row_bytes or head.num_bytes > _MAX_PART_BYTES:
            raise GroupError(f"{self._link.peer} sends {head.num_bytes} bytes, no rows of {row_bytes}")
        self.tensor = torch.empty((head.num_bytes // row_bytes, *rest), dtype=self._own.dtype)
        return _bytes_of(self.tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
