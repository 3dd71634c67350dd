"""The work and the time of the passes of the last minute, summed over passes of the same size in the same second."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from moeflow.core.batch import Batch
from moeflow.core.engine_messages import ExpertStats
from moeflow.core.observation import FirstToken, PassGroup, SpeedSight

KEPT_S: Final = 60.0
_MAX_FIRST_TOKENS: Final = 64

_Size = tuple[int, int, int]  # tokens, sampled rows, sequences


class PassSpeeds:
    """Counts passes as they end. All times are of one clock, which never goes back."""

    def __init__(self, now_s: float, experts: ExpertStats) -> None:
        """`experts` are the engine's totals now."""
        self._since_s = now_s
        self._experts = experts
        self._busy_since_s: float | None = None  # the end of the last pass, if more work was there
        self._seconds: deque[tuple[int, dict[_Size, PassGroup]]] = deque()  # by the second of the clock
        self._first_tokens: deque[tuple[float, FirstToken]] = deque(maxlen=_MAX_FIRST_TOKENS)
        self._shared_until_s = now_s  # the end of the last pass of several requests

    def note(  # what a pass is
        self,
        batch: Batch,
        *,
        num_generated: int,
        started_s: float,
        ended_s: float,
        experts: ExpertStats,
        distinct: float | None,
        is_idle: bool,
    ) -> None:
        """Count a pass. `experts`: the totals after it. `distinct`: experts of a layer that it used, mean of layers;
        None: not counted. `is_idle`: no work is left.
        """
        begin_s = started_s if self._busy_since_s is None else self._busy_since_s
        self._busy_since_s = None if is_idle else ended_s
        entries = batch.entries
        size = (batch.num_tokens, sum(entry.num_sampled for entry in entries), len(entries))
        groups = self._groups_of(int(ended_s))
        known = groups.get(size)
        if known is None:
            known = PassGroup(num_tokens=size[0], num_sampled=size[1], num_sequences=size[2], age_s=0.0)
        groups[size] = msgspec.structs.replace(
            known,
            age_s=ended_s,  # becomes an age where it is asked for
            num_passes=known.num_passes + 1,
            num_generated=known.num_generated + num_generated,
            seconds=known.seconds + ended_s - begin_s,
            num_seen=known.num_seen + sum(_num_seen(entry.start, entry.num_rows) for entry in entries),
            num_read=known.num_read + sum(entry.start + entry.num_rows for entry in entries),
            stall_s=known.stall_s + experts.expert_stall_s_total - self._experts.expert_stall_s_total,
            waited_s=known.waited_s + _waited_s(experts) - _waited_s(self._experts),
            read_bytes=known.read_bytes + _read_bytes(experts) - _read_bytes(self._experts),
            distinct=known.distinct + (distinct or 0.0),
            num_counted=known.num_counted + (distinct is not None),
        )
        self._experts = experts
        self._note_first_tokens(batch, ended_s)

    def drop(self) -> None:
        """A pass has failed: the next one begins when it begins."""
        self._busy_since_s = None

    def sight(self, now_s: float) -> SpeedSight:
        """Return the passes of the last minute."""
        self._forget(now_s)
        return SpeedSight(
            observed_s=now_s - self._since_s,
            groups=[
                msgspec.structs.replace(group, age_s=now_s - group.age_s)
                for _, groups in self._seconds
                for group in groups.values()
            ],
            first_tokens=[
                msgspec.structs.replace(first, age_s=now_s - ended_s) for ended_s, first in self._first_tokens
            ],
        )

    def _groups_of(self, second: int) -> dict[_Size, PassGroup]:
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget(second)
            self._seconds.append((second, {}))
        return self._seconds[-1][1]

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - KEPT_S:
            self._seconds.popleft()
        while self._first_tokens and self._first_tokens[0][0] < now_s - KEPT_S:
            self._first_tokens.popleft()

    def _note_first_tokens(self, batch: Batch, ended_s: float) -> None:
        if len(batch.entries) > 1:
            self._shared_until_s = ended_s
        for entry in batch.entries:
            request, num_prompt = entry.request, len(entry.request.prompt_token_ids)
            ends_prompt = entry.start < num_prompt <= entry.stop
            if not ends_prompt or not entry.samples or request.queued_s is None:
                continue
            begun_s = request.submitted_s + request.queued_s
            first = FirstToken(
                age_s=0.0,
                num_prompt_tokens=num_prompt,
                num_computed_tokens=num_prompt - request.num_cached_tokens,
                seconds=ended_s - begun_s,
                was_alone=begun_s >= self._shared_until_s,
            )
            self._first_tokens.append((ended_s, first))


def _num_seen(start: int, num_rows: int) -> int:
    """Return the positions that rows attend to, each to all before it and to itself."""
    return num_rows * start + num_rows * (num_rows + 1) // 2


def _read_bytes(experts: ExpertStats) -> int:
    return experts.expert_demand_bytes_total + experts.expert_prefetched_bytes_total


def _waited_s(experts: ExpertStats) -> float:
    """Return how long ranks have waited for each other, the mean of ranks; where a GPU shares experts, for it."""
    ranks = sum(rank.waited_s_total for rank in experts.ranks) / max(len(experts.ranks), 1)
    return ranks + experts.cpu_wait_s_total
