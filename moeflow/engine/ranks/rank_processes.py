"""The other ranks of an engine as processes of this machine: started, given each pass over pipes, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Final

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks.ranks import Ranks
from moeflow.parallel.child_processes import EXIT_GRACE_S, close_pipe, end_all
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor

LENGTH_BYTES: Final = 8  # before each message in a pipe


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    process_ids: list[int]  # by rank
    timeout_s: float  # of a collective


class RankProcesses(Ranks):
    """Child processes of this one, which exchange tensors through shared memory."""

    def __init__(self, config: EngineConfig, parallel: ParallelConfig) -> None:
        """Start the processes, which begin to load. Raises: ConfigError if they cannot share memory here; OSError."""
        descriptor = make_descriptor(parallel.num_ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, parallel.num_ranks):
                self._processes.append(_start(descriptor, rank))
            process_ids = [os.getpid(), *(process.pid for process in self._processes)]
            self.group = SharedMemoryGroup(descriptor, 0, process_ids, parallel.timeout_s)
            self._tell_all(msgspec.msgpack.encode(RankStart(config, process_ids, parallel.timeout_s)))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(descriptor)

    def wait_until_loaded(self) -> None:
        """See `Ranks`."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise GroupError(f"rank {rank} of the engine could not load the model ({_ending(process)})")

    def close(self) -> None:
        """See `Ranks`."""
        end_all(self._processes)
        self.group.close()

    def _tell_all(self, message: bytes) -> None:
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
                process.stdin.flush()
            except BrokenPipeError:
                raise GroupError(f"rank {rank} of the engine is gone ({_ending(process)})") from None

    def _note_ending(self, error: GroupError) -> None:
        """Note the signal that has ended a rank, if one has: others end by themselves when the group does."""
        codes = [process.poll() or 0 for process in self._processes]
        error.signal_number = -min(*codes, 0)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            close_pipe(process.stdin)
            close_pipe(process.stdout)


def _start(descriptor: int, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moeflow.engine.ranks.main", str(descriptor), str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(descriptor,))


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_GRACE_S)
    return f"process {process.pid} ended with {process.returncode}"


def read_messages(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield the messages of a pipe as they come, until it ends."""
    while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield pipe.read(int.from_bytes(head, "little"))
