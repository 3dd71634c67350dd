"""The processes of a measurement, seen from who started them: given each pass, asked what they measured, ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from moeflow.core.errors import GroupError
from moeflow.core.units import MIB
from moeflow.parallel.child_processes import EXIT_GRACE_S, end_all, start_rank
from moeflow.parallel.shared_memory_group import make_descriptor
from studies.parallel.case import LayerShape
from studies.parallel.rank import RankRun, RankStart, RatesTask, Task
from studies.parallel.rank_rates import Measured, usual
from studies.parallel.shared_weights import SharedWeights

BUFFER_BYTES: Final = 64 * MIB  # of each of a rank's two: what is longer goes in pieces, with a wait for each
TIMEOUT_S: Final = 600.0  # of a collective: a rank may pad for long

Answer = TypeVar("Answer", RankRun, Measured)


class RankProcesses:
    """Ranks that hold one layer. A context manager, at whose end they are gone."""

    def __init__(self, layer: LayerShape, on_expert: Callable[[], None] = lambda: None) -> None:
        """Pack the layer and start the processes; `on_expert` is called after each expert.

        Raises: ConfigError if they cannot share memory here; OSError.
        """
        descriptors = [make_descriptor(layer.num_ranks, BUFFER_BYTES)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            descriptors.append(SharedWeights.make_descriptor(layer, on_expert))
            for rank in range(layer.num_ranks):
                self._processes.append(start_rank("studies.parallel.rank", descriptors, rank))
            self._tell_all(RankStart(layer, [process.pid for process in self._processes], TIMEOUT_S))
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def run(self, task: Task) -> list[RankRun]:
        """Run a pass; return what each rank measured. Raises: GroupError if one of them is gone."""
        self._tell_all(task)
        return [self._answer(rank, RankRun) for rank in range(len(self._processes))]

    def measure_rates(self) -> Measured:
        """Have all ranks measure what predictions start from; return what is usual. Raises: GroupError."""
        self._tell_all(RatesTask())
        return usual([self._answer(rank, Measured) for rank in range(len(self._processes))])

    def close(self) -> None:
        """End the ranks. Blocks: for a moment; one in the midst of a pass is killed after some seconds."""
        end_all(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tell_all(self, message: RankStart | Task | RatesTask) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise self._gone(rank) from None

    def _answer(self, rank: int, kind: type[Answer]) -> Answer:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._gone(rank)
        return msgspec.json.decode(line, type=kind)

    def _gone(self, rank: int) -> GroupError:
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(EXIT_GRACE_S)
        return GroupError(f"rank {rank} of the measurement is gone (it ended with {self._processes[rank].returncode})")
