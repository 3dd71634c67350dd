"""Compiles the grammars of an engine's requests, in threads beside its passes.

The vocabulary is loaded for the first form, or ahead of it. Grammars that were compiled lately are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from moeflow.core.errors import MoeflowError, RequestError
from moeflow.engine.constraints.priority import COMPILING, lower
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    import llguidance

    from moeflow.engine.constraints.compiled_grammar import CompiledGrammar

with on_demand(__name__):
    from moeflow.engine.constraints import compiled_grammar, grammar_tokens
    from moeflow.text import tokenizer

NUM_KEPT: Final = 32  # grammars
NUM_COMPILED: Final = 2  # at once


class Constraints:
    """Of one engine, which alone calls it."""

    def __init__(self, model_path: str, eos_token_ids: Sequence[int]) -> None:
        self._path = Path(model_path)
        self._eos_token_ids = eos_token_ids
        self._vocabulary: llguidance.LLTokenizer | RequestError | None = None
        self._loading = Lock()
        self._kept: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._compiling = ThreadPoolExecutor(NUM_COMPILED, thread_name_prefix="grammars", initializer=self._load)

    def compiled(self, grammar: str) -> Future[CompiledGrammar]:
        """Return the grammar once it is compiled; a RequestError if it cannot be."""
        kept = self._kept.get(grammar)
        if kept is None or (kept.done() and kept.exception() is not None):
            kept = self._kept[grammar] = self._compiling.submit(self._compile, grammar)
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return kept

    def load_ahead(self) -> None:
        """Load the vocabulary in a thread. For 50,000 tokens it holds Python's lock twice, for about 0.1 s."""
        if self._vocabulary is None:
            self._compiling.submit(bool)  # a thread begins with loading

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(cancel_futures=True)

    def _load(self) -> None:
        """Load the vocabulary, which all grammars wait for, and lower the priority of the thread only then."""
        with self._loading:
            if self._vocabulary is None:
                try:
                    loaded = tokenizer.Tokenizer.load(self._path)
                    self._vocabulary = grammar_tokens.tokens_of(loaded, self._eos_token_ids)
                except (MoeflowError, OSError) as error:  # its files may be gone since the model was loaded
                    self._vocabulary = error if isinstance(error, RequestError) else RequestError(str(error))
        lower(COMPILING)

    def _compile(self, grammar: str) -> CompiledGrammar:
        assert self._vocabulary is not None, "threads begin with loading it"
        if isinstance(self._vocabulary, RequestError):
            raise self._vocabulary
        return compiled_grammar.CompiledGrammar(self._vocabulary, grammar)
