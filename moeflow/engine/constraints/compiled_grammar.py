"""A grammar that is compiled for a model's vocabulary: requests with the same grammar follow copies of it.

The copies share the states of a lexer, and with them its errors. So a request that meets one takes a fresh copy before
it fails. They also share the lock of the lexer. A thread that waits for it keeps Python's lock, so one copy works at a
time.
"""

from __future__ import annotations

from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.grammar_constraint import GrammarConstraint
from moeflow.engine.constraints.limits import LIMITS, reason_of


class CompiledGrammar:
    """Of one engine."""

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        """Compile, with all that a first mask needs. Raises: RequestError if that fails."""
        self._vocabulary, self._grammar = vocabulary, grammar
        self._matcher = self._compiled()
        self._lock = Lock()

    def constraint(self) -> GrammarConstraint:
        """Return the constraint of one more request."""
        return GrammarConstraint(self.copy, self.fresh_copy, self._lock)

    def copy(self) -> LLMatcher:
        """Return a matcher at the beginning of an answer."""
        return self._matcher.deep_copy()

    def fresh_copy(self) -> LLMatcher:
        """Return one that shares nothing with those before it. Raises: RequestError."""
        self._matcher = self._compiled()
        return self.copy()

    def _compiled(self) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, self._grammar, limits=LIMITS, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"the form of the answer is not supported: {reason_of(matcher.get_error())}")
        return matcher
