"""The other ranks of an engine as processes of this machine: started, given each pass over pipes, ended."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Final

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError
from moeflow.core.parallel_config import ParallelConfig, device_of_rank
from moeflow.engine.ranks.ranks import Ranks
from moeflow.parallel.child_processes import EXIT_GRACE_S, close_pipe, end_all, start_rank
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.stages import subgroups

LENGTH_BYTES: Final = 8  # before each message in a pipe
_LOOK_S: Final = 0.5  # interval of looks at ranks that load
_LOST_GRACE_S: Final = 0.5  # for ranks to leave by themselves after one is lost


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    process_ids: list[int]  # by rank


class RankProcesses(Ranks):
    """Child processes of this one, which exchange tensors through shared memory."""

    group: SharedMemoryGroup

    def __init__(self, config: EngineConfig, parallel: ParallelConfig) -> None:
        """Start the processes, which begin to load. Raises: ConfigError if they cannot share memory here; OSError."""
        descriptors: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            descriptors.append(make_descriptor(parallel.num_ranks))
            descriptors.extend(make_descriptor(len(ranks)) for ranks in subgroups(parallel))
            for rank in range(1, parallel.num_ranks):
                self._processes.append(start_rank("moeflow.engine.ranks.main", descriptors, rank))
            process_ids = [os.getpid(), *(process.pid for process in self._processes)]
            self.group = join_group(descriptors, 0, process_ids, parallel)
            for rank in range(1, parallel.num_ranks):
                start = RankStart(config_of_rank(config, rank), process_ids)
                self._tell(rank, msgspec.msgpack.encode(start))
        except BaseException:
            self._kill()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def wait_until_loaded(self) -> None:
        """See `Ranks`."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            while not select.select([process.stdout], [], [], _LOOK_S)[0]:
                self.check()
            if not process.stdout.read(1):
                raise GroupError(f"rank {rank} of the engine could not load the model ({_ending(process)})")

    def close(self) -> None:
        """See `Ranks`."""
        end_all(self._processes, _LOST_GRACE_S if self._has_lost else EXIT_GRACE_S)
        self.group.close()

    def _tell_all(self, message: bytes) -> None:
        for rank in range(1, len(self._processes) + 1):
            self._tell(rank, message)

    def _tell(self, rank: int, message: bytes) -> None:
        process = self._processes[rank - 1]
        assert process.stdin is not None
        try:
            process.stdin.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
            process.stdin.flush()
        except BrokenPipeError:
            raise GroupError(f"rank {rank} of the engine is gone ({_ending(process)})") from None

    def _look(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise GroupError(f"rank {rank} of the engine is gone ({_ending(process)})")
        self.group.check_running()

    def _note_ending(self, error: GroupError) -> None:
        """Note the signal that has ended a rank, if one has: others end by themselves when the group does."""
        codes = [process.poll() or 0 for process in self._processes]
        error.signal_number = -min(*codes, 0)
        error.is_from_outside = self.group.has_stopped()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            close_pipe(process.stdin)
            close_pipe(process.stdout)


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return a configuration with the device of a rank."""
    offload = config.offload
    if offload is not None and offload.cuda is not None:
        cuda = replace(offload.cuda, name=device_of_rank(offload.cuda.name, rank))
        offload = replace(offload, cuda=cuda)
    return replace(config, device=device_of_rank(config.device, rank), offload=offload)


def join_group(
    descriptors: Sequence[int], rank: int, process_ids: Sequence[int], parallel: ParallelConfig
) -> SharedMemoryGroup:
    """Return a rank's group with its subgroups, from descriptors of its memory and of theirs, which stay open."""
    whole, *parts = descriptors
    group = SharedMemoryGroup(whole, rank, process_ids, parallel.timeout_s)
    for ranks, descriptor in zip(subgroups(parallel), parts, strict=True):
        if rank in ranks:
            group.add_subgroup(ranks, descriptor)
    return group


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_GRACE_S)
    return f"process {process.pid} ended with {process.returncode}"


def read_messages(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield the messages of a pipe as they come, until it ends."""
    while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield pipe.read(int.from_bytes(head, "little"))
