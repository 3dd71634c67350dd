"""Measured passes by what they do, from the sights of all engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from moeflow.core.observation import FirstToken, PassGroup, SpeedSight

PassKind = Literal["decode", "prompts"]
NOW_S: Final = 5.0  # passes so shortly before the last one are "now"
_ENOUGH: Final = 3  # passes for a speed


class Measured(msgspec.Struct, frozen=True):
    """The passes of the last minute, by the place of their engine."""

    sights: Mapping[int, SpeedSight]

    @property
    def observed_s(self) -> float:
        """How long passes have been observed; 0: no engine answers."""
        return max((sight.observed_s for sight in self.sights.values()), default=0.0)

    def groups(self, kind: PassKind) -> dict[int, list[PassGroup]]:
        """Return the passes of a kind by engine; engines without any are left out."""
        found = {
            place: [it for it in sight.groups if kind_of(it) == kind and it.seconds > 0]
            for place, sight in self.sights.items()
        }
        return {place: groups for place, groups in found.items() if groups}

    def now(self, kind: PassKind) -> tuple[list[PassGroup], int]:
        """Return the newest passes of a kind, and how many engines computed them."""
        by_engine = self.groups(kind)
        if not by_engine:
            return [], 0
        newest_s = min(it.age_s for groups in by_engine.values() for it in groups)
        recent = {place: [it for it in groups if it.age_s <= newest_s + NOW_S] for place, groups in by_engine.items()}
        return [it for groups in recent.values() for it in groups], sum(bool(groups) for groups in recent.values())

    def trail(self, kind: PassKind) -> list[tuple[list[PassGroup], int]]:
        """Return the passes of a kind second by second, the oldest first, with the number of engines."""
        seconds: dict[int, dict[int, list[PassGroup]]] = {}
        for place, groups in self.groups(kind).items():
            for it in groups:
                seconds.setdefault(round(it.age_s), {}).setdefault(place, []).append(it)
        ordered = sorted(seconds.items(), reverse=True)
        return [([it for groups in each.values() for it in groups], len(each)) for _, each in ordered]

    def plain_decoding(self, num_sequences: int) -> list[PassGroup]:
        """Return passes that only decode so many sequences, without drafts: the plan predicts these."""
        return [
            it
            for groups in self.groups("decode").values()
            for it in groups
            if it.num_sequences == num_sequences == it.num_tokens
        ]

    @property
    def largest_batch(self) -> int:
        """The most sequences that decoded together in several passes; 0: at most one did."""
        counts: dict[int, int] = {}
        for groups in self.groups("decode").values():
            for it in groups:
                if it.num_sequences == it.num_tokens:
                    counts[it.num_sequences] = counts.get(it.num_sequences, 0) + it.num_passes
        return max((number for number, count in counts.items() if number > 1 and count >= _ENOUGH), default=0)

    @property
    def first_token(self) -> FirstToken | None:
        """The newest first token of a request alone; None: there was none in the last minute."""
        alone = (it for sight in self.sights.values() for it in sight.first_tokens if it.was_alone)
        return min(alone, key=lambda it: it.age_s, default=None)


def kind_of(group: PassGroup) -> PassKind:
    """Return what passes do: those with any part of a prompt are of prompts."""
    return "decode" if group.num_tokens == group.num_sampled else "prompts"


def mean_context(groups: Sequence[PassGroup]) -> float:
    """Return the positions that a token sees, on average."""
    return _sum(it.num_seen for it in groups) / _sum(it.num_tokens * it.num_passes for it in groups)


def mean_step_s(groups: Sequence[PassGroup]) -> float:
    """Return the seconds of a pass."""
    return _sum(it.seconds for it in groups) / _sum(it.num_passes for it in groups)


def _sum(values: Iterable[float]) -> float:
    return sum(values, 0.0)
