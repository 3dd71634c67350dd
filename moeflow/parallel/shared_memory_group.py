"""A group of processes on one machine, which exchange bytes through memory that all of them map.

The extension does the exchange (csrc/threads/shared_group.h); this module turns tensors into addresses. A waiting rank
looks whether the others have ended or are stopped, and whether time is up. Callers start the processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import ConfigError, GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel.collectives import Collectives
from moeflow.parallel.patience import Patience
from moeflow.parallel.process_watch import ProcessWatch

if extension.is_available():
    import moeflow.kernels._cpu as _cpu

BUFFER_BYTES: Final = 4 << 20  # of each of a rank's two; longer data is sent in pieces
_LOOK_S: Final = 0.05  # so soon is it noticed that a rank has ended, or that a signal has come
STOPPED_S: Final = 2.0  # after which a stopped rank counts as lost
IDLE_S: Final = 10.0  # after which a rank that uses no processor counts as lost


def make_descriptor(num_ranks: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Make the memory of a group: a file without a name, which processes inherit and which goes with the last of them.

    A rank's buffers take memory when they are first used.

    Raises: ConfigError without the extension or for too many ranks; OSError.
    """
    _check_extension()
    try:
        num_bytes = _cpu.segment_bytes(num_ranks, buffer_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    descriptor = os.memfd_create("moeflow-group")
    os.ftruncate(descriptor, num_bytes)
    with mmap.mmap(descriptor, num_bytes) as memory:
        _cpu.make_segment(_address(memory), num_ranks, buffer_bytes)
    return descriptor


class SharedMemoryGroup(Collectives):
    """The `Group` of a process that maps the memory of `make_descriptor`. Tensors are in main memory."""

    def __init__(
        self,
        descriptor: int,
        rank: int,
        process_ids: Sequence[int],
        timeout_s: float,
        whole: SharedMemoryGroup | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Join as `rank` of the processes, whose ids are given by rank. The descriptor may be closed afterwards.

        A subgroup is that of the `members` of a `whole`: see `add_subgroup`.

        Raises: ConfigError without the extension; GroupError if the memory is that of another group.
        """
        _check_extension()
        self.rank = rank
        self.size = len(process_ids)
        self._patience = Patience(timeout_s)
        self._whole = whole
        self._numbers = members or range(self.size)  # of ranks, as errors have them
        self._subgroups: dict[tuple[int, ...], SharedMemoryGroup] = {}
        self._peers = [ProcessWatch(process_id) for process_id in process_ids]
        self._memory = mmap.mmap(descriptor, 0)  # all of it
        try:
            self._exchange = _cpu.SharedGroup(_address(self._memory), rank)
        except ValueError as error:
            raise GroupError(str(error)) from error
        if self._exchange.num_ranks != self.size:
            raise GroupError(f"the memory is that of {self._exchange.num_ranks} ranks, and there are {self.size}")

    def add_subgroup(self, ranks: Sequence[int], descriptor: int) -> None:
        """Join the group of some ranks, ascending, over memory of its own; the descriptor may be closed afterwards."""
        process_ids = [self._peers[rank].process_id for rank in ranks]
        own = ranks.index(self.rank)
        self._subgroups[tuple(ranks)] = SharedMemoryGroup(
            descriptor, own, process_ids, self._patience.limit_s, whole=self, members=ranks
        )

    def subgroup(self, ranks: Sequence[int]) -> SharedMemoryGroup:
        """Return the group of some ranks, which was added; see `Group`."""
        return self._subgroups[tuple(ranks)]

    def channel(self, rank: int) -> SharedMemoryChannel:
        """Return a channel to a rank with which this one is a subgroup; see `Group`."""
        return SharedMemoryChannel(self.subgroup(sorted((self.rank, rank))))

    def abort(self, reason: str) -> None:
        """End the group; see `Group`."""
        if self._whole is not None:
            self._whole.abort(reason)
            return
        reason = f"rank {self.rank}: {reason}"
        self._exchange.abort(reason)
        for subgroup in self._subgroups.values():  # where others wait for this rank; they end theirs
            subgroup._exchange.abort(reason)

    def close(self) -> None:
        """Unmap the memory: nothing else may be called afterwards."""
        for subgroup in self._subgroups.values():
            subgroup.close()
        self._exchange = None  # it has the address
        self._memory.close()

    def _collect(self, label: str, parts: list[Tensor], *, is_for_all: bool, own: Tensor) -> list[Tensor]:
        """See `Collectives`. Whatever goes wrong ends the group: this rank is no longer where the others are."""
        try:
            self._patience.begin()
            found = self._exchange_parts(label, parts, is_for_all=is_for_all, own=own)
            self._patience.end()
        except BaseException as error:
            self.abort(str(error) or type(error).__name__)
            raise
        return found

    def _exchange_parts(self, label: str, parts: list[Tensor], *, is_for_all: bool, own: Tensor) -> list[Tensor]:
        exchange = self._exchange
        exchange.start(label, [(part.data_ptr(), part.nbytes) for part in parts], is_for_all)
        if self.meanwhile is not None:
            self.meanwhile()
        self._wait(label)
        rest = own.shape[1:]
        row_bytes = rest.numel() * own.itemsize
        outs = [
            own if rank == self.rank else torch.empty((num_bytes // row_bytes, *rest), dtype=own.dtype)
            for rank, num_bytes in enumerate(exchange.incoming_bytes())
        ]
        addresses = [out.data_ptr() for out in outs]
        while exchange.advance(addresses):
            self._wait(label)
        return outs

    def _wait(self, label: str) -> None:
        """Wait until all ranks have published their piece."""
        for peer in self._peers:
            peer.expect()
        deadline = time.monotonic() + self._patience.limit_s
        while True:
            left_s = deadline - time.monotonic()
            state = self._exchange.wait(max(0.0, min(_LOOK_S, left_s)))
            if state == _cpu.SharedGroup.State.COMPLETE:
                return
            if state == _cpu.SharedGroup.State.ABORTED:
                raise GroupError(f"the group ended before {label} did: {self._exchange.abort_reason()}")
            if state == _cpu.SharedGroup.State.MISMATCH:
                raise GroupError(self._mismatch())
            self._check_missing(label, is_late=left_s <= 0)

    def has_stopped(self) -> bool:
        """Return whether a rank's process is stopped."""
        for peer in self._peers:
            peer.look()
        return any(peer.is_stopped for peer in self._peers)

    def check_running(self) -> None:
        """Look at the processes of all other ranks. Raises: GroupError if one has ended, or is stopped."""
        for rank, peer in enumerate(self._peers):
            if rank != self.rank:
                peer.look()
                if problem := _problem(peer):
                    raise GroupError(f"rank {self._numbers[rank]} does not answer ({problem})")

    def _check_missing(self, label: str, *, is_late: bool) -> None:
        """Raise if a rank that is waited for has ended or is stopped, or if time is up."""
        peers = {rank: self._peers[rank] for rank in self._exchange.missing()}
        for peer in peers.values():
            peer.look()
        missing = self._exchange.missing()  # again: one that came before it ended is none
        if not missing:
            return
        for rank in missing:
            if rank in peers and (problem := _problem(peers[rank]) or self._idleness(peers[rank])):
                raise GroupError(f"rank {self._numbers[rank]} did not reach {label} ({problem})")
        if is_late:
            numbers = ", ".join(str(self._numbers[rank]) for rank in missing)
            process_id = self._peers[missing[0]].process_id
            raise GroupError(
                f"rank{'s' if len(missing) > 1 else ''} {numbers} did not reach {label} within "
                f"{self._patience.limit_s:g} s (process {process_id} is still there)"
            )

    def _idleness(self, peer: ProcessWatch) -> str:
        """Return that a rank that has to compute does not; empty: it does, or may itself wait for ranks elsewhere."""
        groups = [self._whole] if self._whole is not None else self._subgroups.values()
        if any(group.size != self.size for group in groups) or peer.idle_s < IDLE_S:
            return ""
        return f"process {peer.process_id} hangs: it has not computed for {peer.idle_s:.0f} s"

    def _mismatch(self) -> str:
        ranks = {self._exchange.label_of(rank): self._numbers[rank] for rank in range(self.size)}
        return "ranks do different things: " + "; ".join(f"rank {rank} is at {label}" for label, rank in ranks.items())


class SharedMemoryChannel:
    """The `Channel` of two ranks: a collective of their group, to which who receives contributes nothing."""

    def __init__(self, group: SharedMemoryGroup) -> None:
        """Take the group of the two."""
        self._group = group

    def send(self, name: str, tensor: Tensor) -> None:
        """Give the other rank a tensor; see `Channel`. Blocks: until it receives."""
        self._group.all_gather(name, tensor)

    def receive(self, name: str, like: Tensor) -> Tensor:
        """Return what the other rank sends; see `Channel`."""
        return self._group.all_gather(name, like[:0])[1 - self._group.rank]


def _problem(peer: ProcessWatch) -> str:
    """Return why a rank's process computes no more; empty: it may compute."""
    if peer.has_ended:
        return f"it is gone: process {peer.process_id} has ended"
    if peer.stopped_s >= STOPPED_S:
        return f"process {peer.process_id} has been stopped for {peer.stopped_s:.0f} s (SIGSTOP)"
    return ""


def _check_extension() -> None:
    if not extension.is_available():
        raise ConfigError(
            f"several ranks on one machine need the CPU extension: {extension.why_not()}; "
            "install moeflow where there is a C++ compiler"
        )
    if not hasattr(_cpu, "SharedGroup"):
        raise ConfigError("several ranks on one machine need Linux; use one")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
