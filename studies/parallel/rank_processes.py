"""The processes of a measurement: ranks that get each pass, return their measurements, and end."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from moeflow.core.units import MIB
from moeflow.parallel.child_processes import rank_command
from moeflow.parallel.shared_memory_group import make_descriptor
from studies.harness.children import Children
from studies.parallel.case import LayerShape
from studies.parallel.rank import RankRun, RankStart, RatesTask, Task
from studies.parallel.rank_rates import Measured, usual
from studies.parallel.shared_weights import SharedWeights
from studies.parallel.whole_model import ModelRun, ModelTask

BUFFER_BYTES: Final = 64 * MIB  # of each of a rank's two: longer data goes in pieces, with a wait for each
TIMEOUT_S: Final = 600.0  # of a collective: a rank may pad for long


class RankProcesses:
    """Ranks that hold one layer. A context manager, at whose end they are gone."""

    def __init__(self, layer: LayerShape, on_expert: Callable[[], None] = lambda: None) -> None:
        """Pack the layer and start the processes; `on_expert` is called after each expert.

        Raises: ConfigError if they cannot share memory here; OSError.
        """
        descriptors = [make_descriptor(layer.num_ranks, BUFFER_BYTES)]
        self._ranks = Children()
        try:
            descriptors.append(SharedWeights.make_descriptor(layer, on_expert))
            for rank in range(layer.num_ranks):
                self._ranks.start(rank_command("studies.parallel.rank", descriptors, rank), descriptors)
            self._ranks.tell(RankStart(layer, [process.pid for process in self._ranks.processes], TIMEOUT_S))
        except BaseException:
            self._ranks.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def run(self, task: Task) -> list[RankRun]:
        """Run a pass; return what each rank measured. Raises: GroupError if one of them is gone."""
        return self._ranks.ask(task, RankRun)

    def run_model(self, task: ModelTask) -> list[ModelRun]:
        """Run a whole model; return what each rank measured. Raises: GroupError if one of them is gone."""
        return self._ranks.ask(task, ModelRun)

    def measure_rates(self) -> Measured:
        """Have all ranks measure the inputs of predictions; return the usual values. Raises: GroupError."""
        return usual(self._ranks.ask(RatesTask(), Measured))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ranks.close()
