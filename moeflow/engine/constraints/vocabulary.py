"""A model's vocabulary as grammars see it: the bytes of each token, which are no text, and which end answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.text.tokenizer import Tokenizer

NO_END: Final = "this model has no token that ends an answer, so none can be held to a form"


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens, as they cross to another process."""

    tokens: list[bytes]
    special_token_ids: list[int]  # no text
    eos_token_ids: list[int]  # end answers; empty: no answer can be held to a form


def vocabulary_of(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a model.

    The markers of calls and reasoning are no text either, so that texts cannot hold one by chance.
    """
    known = [token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size]
    no_text = tokenizer.special_token_ids | tokenizer.marker_ids | set(known)
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        sorted(token_id for token_id in no_text if token_id < tokenizer.vocab_size),
        known,
    )
