"""A model's vocabulary as llguidance takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.vocabulary import NO_END, Vocabulary, vocabulary_of
from moeflow.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


def tokens_of(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model. Its own tokenizer encodes texts. See `for_grammars`."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return for_grammars(vocabulary_of(tokenizer, eos_token_ids), encode)


def for_grammars(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """Return the vocabulary for llguidance. `encode` splits a text into tokens; None: the longest that fit.

    Takes about half a second for 50,000 tokens, most of it without letting other threads run.

    Raises: RequestError if no token ends answers.
    """
    if not vocabulary.eos_token_ids:
        raise RequestError(NO_END)
    source = _Source(vocabulary, encode or _LongestTokens(vocabulary))
    return LLTokenizer(TokenizerWrapper(source), eos_token=vocabulary.eos_token_ids)


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace"))


class _LongestTokens:
    """Encodes a text as the longest token that it begins with, then the rest likewise."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        no_text = set(vocabulary.special_token_ids)
        self._ids = {
            token: token_id for token_id, token in enumerate(vocabulary.tokens) if token and token_id not in no_text
        }
        self._max_bytes = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        utf8, place = text.encode(), 0
        found: list[int] = []
        while place < len(utf8):
            stops = range(min(place + self._max_bytes, len(utf8)), place, -1)
            stop = next((stop for stop in stops if utf8[place:stop] in self._ids), None)
            if stop is None:  # no token begins like that
                place += 1
                continue
            found.append(self._ids[utf8[place:stop]])
            place = stop
        return found
