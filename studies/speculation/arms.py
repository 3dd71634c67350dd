"""The engines that answer in the study. They share one loaded model, and differ only in their drafts.

The arms are no drafts, each speculator alone, and all combined; these draft as much as pays. Optional pairs draft a
fixed number of tokens per pass: as a tree of the likeliest, and as the best single chain. They show the gain of trees
at the same compute, for the first so many speculators of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moeflow.core.engine_config import EngineConfig
from moeflow.core.request import Request
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import Runner
from moeflow.engine.speculators.draft_model import DraftModel
from moeflow.engine.speculators.loading import load_speculators, speculation_of
from moeflow.speculation.draft_tree import DraftNode
from moeflow.speculation.governor import Choice, Governor, ranked
from moeflow.speculation.registry import SPECULATORS
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Experts, Speculator
from moeflow.speculation.usefulness import Usefulness

ALL = "all together"


@dataclass(frozen=True, slots=True)
class Size:
    """A fixed number of drafted tokens a pass."""

    num_tokens: int
    is_chain: bool

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{'chain' if self.is_chain else 'tree'} of {self.num_tokens}"


class FixedSize(Governor):
    """Computes so many drafted tokens for each request, whether that pays or not."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = size

    def choose(
        self,
        roots: Mapping[Request, DraftNode],
        num_rows: int,
        max_tokens: int,
        absent_of: Callable[[Experts], Experts] | None = None,
    ) -> list[Choice]:
        """See `Governor`."""
        if self.times.seconds(num_rows) is None:
            return []
        chosen: list[Choice] = []
        for request, root in roots.items():
            if self._size.is_chain:
                chosen += [(request, token) for token in best_chain(root, self._size.num_tokens)[1]]
            else:
                chosen += ranked({request: root}, self._size.num_tokens)
        return chosen[:max_tokens]


def best_chain(token: DraftNode, num_tokens: int) -> tuple[float, list[DraftNode]]:
    """Return the descendants, one after another, of which most are expected to be right, and how many that is."""
    if not num_tokens or not token.children:
        return 0.0, []
    found = [(child, *best_chain(child, num_tokens - 1)) for child in token.children.values()]
    best, right, rest = max(found, key=lambda each: each[0].chance + each[1])
    return best.chance + right, [best, *rest]


class Always(Usefulness):
    """Has everybody draft so many tokens ahead."""

    def __init__(self, names: Sequence[str], depth: int) -> None:
        super().__init__(names)
        self._depth = depth

    def pays(self, name: str) -> bool:
        """See `Usefulness`."""
        return True

    def depth(self, name: str) -> int:
        """See `Usefulness`."""
        return self._depth


class Arm:
    """One engine and its name."""

    def __init__(
        self, name: str, config: EngineConfig, runner: Runner, speculators: Sequence[Speculator], size: Size | None
    ) -> None:
        self.name, self.size = name, size
        self._speculators = list(speculators)
        self._speculation = _speculation(self._speculators, size, runner) if speculators else None
        self.engine = Engine(config, runner, speculation=self._speculation)

    @property
    def speculators(self) -> list[str]:
        """Who drafts."""
        return [speculator.name for speculator in self._speculators]

    def begin_round(self) -> None:
        """Forget past answers: else a repeated prompt would be drafted from its own answer."""
        if self._speculation is not None:
            self._speculators = _own(*self._speculators)
            self._speculation.speculators = self._speculators

    def begin_answer(self) -> None:
        """Have models draft on as far as this arm wants; they are shared among arms, which answer one by one."""
        for speculator in self._speculators:
            if isinstance(speculator, DraftModel):
                speculator.is_eager = self.size is not None

    def acceptance(self) -> list[dict[str, Any]]:
        """Return what became of each speculator's drafts: by depth, from 1 on, how many were computed and right."""
        return [
            {
                "speculator": one.name,
                "drafting_s": one.drafting_s_total,
                "drafted": one.drafted_total,
                "accepted": one.accepted_total,
            }
            for one in self.engine.stats().speculators
        ]


def make_arms(config: EngineConfig, runner: Runner, sizes: Sequence[int], pools: Sequence[int] = ()) -> list[Arm]:
    """Return the engine that does not draft, then the drafting engines.

    Each of `pools` is a number of speculators whose drafts are merged; without any, all are.
    Raises: CheckpointError, CapacityError.
    """
    pool = load_speculators(config, runner)
    arms = [Arm("none", config, runner, (), None)]
    arms += [Arm(one.name, config, runner, _own(one), None) for one in pool]
    if len(pool) > 1:
        arms.append(Arm(ALL, config, runner, _own(*pool), None))
    for number, num_tokens, is_chain in product(pools or (len(pool),), sizes, (False, True)):
        size, merged = Size(num_tokens, is_chain=is_chain), pool[:number]
        name = size.name if len(merged) == len(pool) else f"{size.name} by {number}"
        arms.append(Arm(name, config, runner, _own(*merged), size))
    return arms


def _own(*pool: Speculator) -> list[Speculator]:
    """Return models as they are, which are loaded once, and others anew: they remember what was said."""
    return [SPECULATORS[one.name]() if one.name in SPECULATORS else one for one in pool]


def _speculation(speculators: Sequence[Speculator], size: Size | None, runner: Runner) -> Speculation:
    if size is None:
        return speculation_of(speculators, runner)
    speculation = speculation_of(speculators, runner, FixedSize(size))
    speculation.usefulness = Always([one.name for one in speculators], size.num_tokens)
    return speculation
