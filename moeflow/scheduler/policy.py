"""What an engine asks of a scheduler, and the policies there are: a new one is a file and a row below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from moeflow.core.batch import Batch
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason, Request
from moeflow.core.token_tree import TokenTree
from moeflow.kv.block_tables import BlockTables
from moeflow.scheduler.prefix_source import PrefixSource
from moeflow.scheduler.scheduler import Scheduler
from moeflow.scheduler.static_batching import StaticBatching


class SchedulingPolicy(Protocol):
    """Decides who takes part in the next pass. The methods are described in `Scheduler`."""

    running: list[Request]
    blocks: BlockTables
    num_preemptions: int

    @property
    def waiting(self) -> Sequence[Request]:
        """All requests that wait."""

    @property
    def has_work(self) -> bool:
        """Whether a pass would compute anything."""

    @property
    def held_s(self) -> float:
        """Seconds that the next pass is held back, in the hope of more requests; 0: it can be run now."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self, trees: Mapping[Request, TokenTree] = ...) -> Batch:
        """Plan the next pass. Drafted tokens may be omitted."""

    def complete(self, batch: Batch, elapsed_s: float = 0.0, num_kept: Mapping[Request, int] = ...) -> None:
        """The pass went well, and took so long."""

    def fail(self, batch: Batch) -> list[Request]:
        """The pass failed; returns the requests that ended by it."""

    def undo(self, batch: Batch) -> bool:
        """The pass failed, perhaps not for all of its requests; False if the policy does not report them apart."""

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request."""

    def check_integrity(self) -> None:
        """Prove the invariants."""


POLICIES: dict[str, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "continuous": Scheduler,
    "static": StaticBatching,
}


def make_scheduler(config: SchedulerConfig, prefixes: PrefixSource | None = None) -> SchedulingPolicy:
    """Return a scheduler of the policy that `config` names; `prefixes` as in `Scheduler`. Raises: ConfigError."""
    if config.policy not in POLICIES:
        raise ConfigError(f"there is no scheduling policy {config.policy!r}; there are {', '.join(POLICIES)}")
    if prefixes is None:
        return POLICIES[config.policy](config)
    if config.policy != "continuous":
        raise ConfigError(f"prefixes are not read from elsewhere with the scheduling policy {config.policy!r}")
    return Scheduler(config, prefixes)
