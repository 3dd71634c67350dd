"""Follows one answer along a grammar. See `core.token_mask.TokenConstraint`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from llguidance import LLMatcher

from moeflow.core.token_mask import TokenMask
from moeflow.engine.constraints.limits import MASK_CPU_S, TOO_SLOW, reason_of

SLOW_S: Final = 0.005  # of processor time
_REMEMBERED: Final = 0.9  # of the time of a slow mask, at each later one
_OF_LEXERS: Final = "lexer error"  # that a matcher may have from another one


class GrammarConstraint:
    """One answer's place in a grammar. Not for several threads at once."""

    def __init__(self, copy: Callable[[], LLMatcher], fresh_copy: Callable[[], LLMatcher], lock: Lock) -> None:
        """Both return a matcher at the beginning of an answer; a fresh one has no errors from others.

        Matchers work while they have the lock.
        """
        self._copy, self._fresh_copy, self._lock = copy, fresh_copy, lock
        self._matcher: LLMatcher | None = None  # made with the first mask: others may hold up a copy
        self._num_taken = 0  # tokens of the answer
        self._expected_s = 0.0  # for the next masks

    @property
    def is_slow(self) -> bool:
        """See `TokenConstraint`."""
        return self._expected_s > SLOW_S

    def masks(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """See `TokenConstraint`."""
        with self._lock:
            return self._masks_alone(token_ids, paths)

    def _masks_alone(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        started_s = time.thread_time()
        if self._matcher is None:
            self._matcher = self._copy()
        found = self._masks(self._matcher, token_ids, paths)
        if _OF_LEXERS in self._matcher.get_error():
            self._matcher, self._num_taken = self._fresh_copy(), 0
            found = self._masks(self._matcher, token_ids, paths)
        self._expected_s = max(time.thread_time() - started_s, _REMEMBERED * self._expected_s)
        return found

    def _masks(
        self, matcher: LLMatcher, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> list[TokenMask | None]:
        new = list(token_ids[self._num_taken :])
        if new and not matcher.consume_tokens(new):
            return [_failure(matcher)] * len(paths)
        self._num_taken += len(new)
        started_s = time.thread_time()
        found = [_mask_after(matcher, path) for path in paths]
        is_slow = time.thread_time() - started_s > MASK_CPU_S * len(paths)
        return [TokenMask(error=TOO_SLOW)] * len(paths) if is_slow else found


def _mask_after(matcher: LLMatcher, path: Sequence[int]) -> TokenMask | None:
    if not path:
        return _mask(matcher)
    num_taken = matcher.try_consume_tokens(list(path))
    mask = _mask(matcher) if num_taken == len(path) else None
    if num_taken and not matcher.rollback(num_taken):
        return _failure(matcher)
    return mask


def _mask(matcher: LLMatcher) -> TokenMask:
    allowed = matcher.compute_bitmask()
    return _failure(matcher) if matcher.is_error() else TokenMask(allowed)


def _failure(matcher: LLMatcher) -> TokenMask:
    return TokenMask(error=f"the answer cannot be held to its form: {reason_of(matcher.get_error())}")
