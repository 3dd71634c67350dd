"""The work and the time of the passes of the last minute, summed over passes of the same size in the same second."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from moeflow.core.batch import BatchEntry
from moeflow.core.observation import FirstToken, PassGroup, SpeedSight
from moeflow.engine.observing.observed_pass import ObservedPass

KEPT_S: Final = 60.0
_MAX_FIRST_TOKENS: Final = 64

_Size = tuple[int, int, int]  # tokens, sampled rows, sequences


class _Sums:
    """What passes of one size add up to."""

    def __init__(self) -> None:
        self.ended_s = 0.0  # of the last one
        self.num_passes = self.num_generated = self.num_seen = self.num_read = self.read_bytes = self.num_counted = 0
        self.seconds = self.stall_s = self.waited_s = self.distinct = 0.0

    def sight(self, size: _Size, now_s: float) -> PassGroup:
        """Return them as an answer has them."""
        num_tokens, num_sampled, num_sequences = size
        sums = {name: value for name, value in vars(self).items() if name != "ended_s"}
        return PassGroup(
            num_tokens=num_tokens,
            num_sampled=num_sampled,
            num_sequences=num_sequences,
            age_s=now_s - self.ended_s,
            **sums,
        )


class PassSpeeds:
    """Counts passes as they end. `now_s` is the observer's clock; the times of passes are the engine's."""

    def __init__(self, now_s: float, num_experts: int) -> None:
        """`num_experts` of a layer; 0: there are none."""
        self._since_s = now_s
        self._num_experts = num_experts
        self._ended_s: float | None = None  # the last pass, if more work was there
        self._seconds: deque[tuple[int, dict[_Size, _Sums]]] = deque()  # by the second of `now_s`
        self._first_tokens: deque[tuple[float, FirstToken]] = deque(maxlen=_MAX_FIRST_TOKENS)
        self._shared_until_s = float("-inf")  # the end of the last pass of several requests

    def note(self, one: ObservedPass, waited_s: float, now_s: float) -> None:
        """Count a pass that ends now. `waited_s`: it waited for other ranks, or for a GPU."""
        entries, ended_s = one.entries, one.start_s + one.duration_s
        size = (one.num_rows, sum(entry.num_sampled for entry in entries), len(entries))
        sums = self._sums_of(size, now_s)
        sums.ended_s = now_s
        sums.num_passes += 1
        sums.num_generated += sum(len(verified.tokens) for verified in one.sampled.values())
        sums.seconds += ended_s - (one.start_s if self._ended_s is None else self._ended_s)
        sums.num_seen += sum(_num_seen(entry.start, entry.num_rows) for entry in entries)
        sums.num_read += sum(entry.start + entry.num_rows for entry in entries)
        sums.stall_s += one.stall_s
        sums.waited_s += waited_s
        sums.read_bytes += one.read_bytes
        if (distinct := self._distinct(one)) is not None:
            sums.distinct += distinct
            sums.num_counted += 1
        self._ended_s = ended_s
        self._note_first_tokens(entries, ended_s, now_s)

    def rest(self) -> None:
        """No work is left, or a pass has failed: the next pass begins when it begins."""
        self._ended_s = None

    def sight(self, now_s: float) -> SpeedSight:
        """Return the passes of the last minute."""
        self._forget(now_s)
        return SpeedSight(
            observed_s=now_s - self._since_s,
            groups=[sums.sight(size, now_s) for _, groups in self._seconds for size, sums in groups.items()],
            first_tokens=[msgspec.structs.replace(it, age_s=now_s - at_s) for at_s, it in self._first_tokens],
        )

    def _sums_of(self, size: _Size, now_s: float) -> _Sums:
        if not self._seconds or self._seconds[-1][0] != int(now_s):
            self._forget(now_s)
            self._seconds.append((int(now_s), {}))
        return self._seconds[-1][1].setdefault(size, _Sums())

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - KEPT_S:
            self._seconds.popleft()
        while self._first_tokens and self._first_tokens[0][0] < now_s - KEPT_S:
            self._first_tokens.popleft()

    def _distinct(self, one: ObservedPass) -> float | None:
        """Return the experts of a layer that a pass used, on average; None: its routers' choices are unknown."""
        ids = one.choices[-1] if one.choices else None
        if ids is None or not ids.shape[1]:
            return None
        num_layers, num_rows, top_k = map(int, ids.shape)
        if num_rows == 1:
            return float(top_k)
        keys = ids + np.arange(0, num_layers * self._num_experts, self._num_experts).reshape(-1, 1, 1)
        counts = np.bincount(keys.ravel(), minlength=num_layers * self._num_experts)
        return int(np.count_nonzero(counts)) / num_layers

    def _note_first_tokens(self, entries: Sequence[BatchEntry], ended_s: float, now_s: float) -> None:
        if len(entries) > 1:
            self._shared_until_s = ended_s
        for entry in entries:
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
            self._first_tokens.append((now_s, first))


def _num_seen(start: int, num_rows: int) -> int:
    """Return the positions that rows attend to, each to all before it and to itself."""
    return num_rows * start + num_rows * (num_rows + 1) // 2
