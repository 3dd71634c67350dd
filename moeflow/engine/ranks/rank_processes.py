"""The other ranks of an engine, seen from the first: started, given each pass, ended.

The first rank has the queue and samples; the others load the same checkpoint and compute the same passes, each with its
own part of the experts. Passes reach them over pipes: they wait for one as long as nobody asks anything. What takes
place within a pass are collectives, which have a deadline. A rank that is gone ends the engine, which is then started
again as after any death.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.models.pass_input import PassInput
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor

LENGTH_BYTES: Final = 8  # before each message in a pipe
EXIT_GRACE_S: Final = 5.0  # how long a rank may take to leave


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    process_ids: list[int]  # by rank
    timeout_s: float  # of a collective


class RankProcesses:
    """Processes 1, 2, ... of an engine; this one is rank 0."""

    def __init__(self, config: EngineConfig, parallel: ParallelConfig) -> None:
        """Start the processes, which begin to load. Raises: ConfigError if they cannot share memory here; OSError."""
        descriptor = make_descriptor(parallel.num_ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, parallel.num_ranks):
                self._processes.append(_start(descriptor, rank))
            process_ids = [os.getpid(), *(process.pid for process in self._processes)]
            self.group: Group = SharedMemoryGroup(descriptor, 0, process_ids, parallel.timeout_s)
            self._tell_all(RankStart(config, process_ids, parallel.timeout_s))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(descriptor)

    def wait_until_loaded(self) -> None:
        """Wait for the ranks to load the model. Raises: GroupError if one of them cannot."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise GroupError(f"rank {rank} of the engine could not load the model ({_ending(process)})")

    @contextmanager
    def all_computing(self, given: PassInput) -> Iterator[None]:
        """Have all ranks compute a pass, which this one does in the block.

        Raises: GroupError if one of them is gone, or if this one fails: it is no longer where the others are.
        """
        try:
            self._tell_all(given)
            yield
        except GroupError as error:
            error.signal_number = self._signal_number()
            raise
        except BaseException as error:
            self.group.abort(f"a pass failed with {type(error).__name__}: {error}")
            raise GroupError(f"a pass failed on rank 0 of the engine: {error}") from error

    def close(self) -> None:
        """End the ranks. Blocks: for a moment, some seconds if one of them hangs."""
        for process in self._processes:
            _close(process.stdin)
        for process in self._processes:
            try:
                process.wait(EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process.stdout)
        self.group.close()

    def _tell_all(self, message: RankStart | PassInput) -> None:
        encoded = msgspec.msgpack.encode(message)
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
                process.stdin.flush()
            except BrokenPipeError:
                raise GroupError(f"rank {rank} of the engine is gone ({_ending(process)})") from None

    def _signal_number(self) -> int:
        """Return the signal that has ended a rank; 0: none has. Others end by themselves when the group does."""
        codes = [process.poll() or 0 for process in self._processes]
        return -min(*codes, 0)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            _close(process.stdin)
            _close(process.stdout)


def _start(descriptor: int, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moeflow.engine.ranks.main", str(descriptor), str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(descriptor,))


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with suppress(BrokenPipeError):  # what was still to be written
            pipe.close()


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_GRACE_S)
    return f"process {process.pid} ended with {process.returncode}"


def read_message(pipe: IO[bytes]) -> bytes | None:
    """Return the next message of a pipe; None: there will be none. Blocks: until there is one."""
    head = pipe.read(LENGTH_BYTES)
    return pipe.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None
