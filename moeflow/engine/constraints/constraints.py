"""Makes the constraints of an engine's requests, in a thread beside its passes, and computes their masks, in another.

Nothing is loaded before a first request asks for a form. Grammars that were compiled lately are copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeflow.core.batch import BatchEntry
from moeflow.core.errors import RequestError
from moeflow.core.request import Request
from moeflow.core.token_mask import TokenConstraint, TokenMask
from moeflow.engine.verification import Masks
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    import llguidance

    from moeflow.engine.constraints import grammar_constraint, limits, vocabulary
    from moeflow.engine.text import tokenizer
else:
    llguidance = on_demand("llguidance")
    grammar_constraint = on_demand("moeflow.engine.constraints.grammar_constraint")
    limits = on_demand("moeflow.engine.constraints.limits")
    vocabulary = on_demand("moeflow.engine.constraints.vocabulary")
    tokenizer = on_demand("moeflow.engine.text.tokenizer")

NUM_KEPT: Final = 32  # grammars


class Constraints:
    """Of one engine."""

    def __init__(self, model_path: str, eos_token_ids: Sequence[int]) -> None:
        self._path = Path(model_path)
        self._eos_token_ids = eos_token_ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def make(self, grammar: str) -> Future[TokenConstraint]:
        """Return the constraint that a grammar is, once it is there; a RequestError if it is none."""
        return self._compiling.submit(self._make, grammar)

    def close(self) -> None:
        """End the thread."""
        self._compiling.shutdown(cancel_futures=True)

    def _make(self, grammar: str) -> TokenConstraint:
        if self._vocabulary is None:
            self._vocabulary = vocabulary.make_vocabulary(tokenizer.Tokenizer.load(self._path), self._eos_token_ids)
        matcher = self._kept.get(grammar)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._vocabulary, grammar, limits=limits.LIMITS)
            if matcher.is_error():
                raise RequestError(f"the form of the answer is not supported: {limits.reason_of(matcher.get_error())}")
            self._kept[grammar] = matcher
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return grammar_constraint.GrammarConstraint(matcher.deep_copy())


class MaskThread:
    """Computes the masks of a pass while that runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, entries: Sequence[BatchEntry]) -> Future[Masks] | None:
        """Begin with those of entries that sample; None: no request among them has a form."""
        asked = [entry for entry in entries if entry.samples and entry.request.constraint is not None]
        return self._thread.submit(_masks_of, asked) if asked else None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _masks_of(entries: Sequence[BatchEntry]) -> Masks:
    found: dict[Request, Sequence[TokenMask | None]] = {}
    for entry in entries:
        assert entry.request.constraint is not None, "only requests with a form are asked for"
        found[entry.request] = entry.request.constraint.masks(entry.request.output_token_ids, entry.tree.paths)
    return found
