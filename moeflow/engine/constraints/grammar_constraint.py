"""Follows one answer along a grammar. See `core.token_mask.TokenConstraint`."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from moeflow.core.token_mask import TokenMask
from moeflow.engine.constraints.limits import reason_of


class GrammarConstraint:
    """One answer's place in a grammar. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_taken = 0  # tokens of the answer

    def masks(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """See `TokenConstraint`."""
        new = list(token_ids[self._num_taken :])
        if new and not self._matcher.consume_tokens(new):
            return [self._failure()] * len(paths)
        self._num_taken += len(new)
        return [self._mask_after(path) for path in paths]

    def _mask_after(self, path: Sequence[int]) -> TokenMask | None:
        if not path:
            return self._mask()
        num_taken = self._matcher.try_consume_tokens(list(path))
        mask = self._mask() if num_taken == len(path) else None
        if num_taken and not self._matcher.rollback(num_taken):
            return self._failure()
        return mask

    def _mask(self) -> TokenMask:
        allowed = self._matcher.compute_bitmask()
        return self._failure() if self._matcher.is_error() else TokenMask(allowed)

    def _failure(self) -> TokenMask:
        reason = reason_of(self._matcher.get_error())
        return TokenMask(error=f"the answer cannot be held to its form: {reason}")
