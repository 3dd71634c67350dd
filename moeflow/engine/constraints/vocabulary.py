"""A model's vocabulary as grammars see it: the bytes of each token, which are no text, and which end answers."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from moeflow.core.errors import RequestError
from moeflow.engine.text.tokenizer import Tokenizer


def make_vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return it. Takes about half a second for 50,000 tokens, most of it without letting other threads run.

    The markers of calls and reasoning are no text either, so that texts cannot hold one by chance.

    Raises: RequestError if no token ends answers.
    """
    known = [token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size]
    if not known:
        raise RequestError("this model has no token that ends an answer, so none can be held to a form")
    return LLTokenizer(TokenizerWrapper(_Source(tokenizer, known)), eos_token=known)


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        no_text = tokenizer.special_token_ids | tokenizer.marker_ids | set(eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in no_text if token_id < tokenizer.vocab_size)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
