"""How many tokens a text has at least, so that one that is too long can be refused before it is tokenized.

This must hold for every text, so it is known only for pipelines of known steps: byte-level and SentencePiece
vocabularies of the supported families. Steps that drop text (a normalizer that
strips accents, an unknown token that stands for any number of characters) leave nothing to say.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from tokenizers import Tokenizer, models

from moeflow.text.token_bytes import BYTE_LEVEL_ALPHABET

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NFC_SHRINKS = 3  # times at most, in UTF-8: nine bytes of conjoining jamo become a syllable of three
_KEEPS_ALL = frozenset(("ByteLevel", "Metaspace", "Digits"))
_MAY_REMOVE = frozenset(("Split", "Punctuation"))


class TokenLength(msgspec.Struct, frozen=True):
    """What bounds the number of a text's tokens from below."""

    max_bytes: int  # of UTF-8 that one token stands for
    dropped: bytes = b""  # values of bytes that the vocabulary lacks and that leave no token

    def fewest_tokens(self, utf8: bytes) -> int:
        """Return how many tokens a text has at least."""
        if self.dropped:
            utf8 = utf8.translate(None, self.dropped)
        return -(-len(utf8) // self.max_bytes)


def token_length(core: Tokenizer) -> TokenLength | None:
    """Return the bounds of a tokenizer's tokens; None if they may stand for any number of bytes."""
    shrinks = _normalizer_shrinks(_state(core.normalizer))
    steps = _steps(_state(core.pre_tokenizer), "pretokenizers")
    if shrinks is None or not all(map(_keeps_text, steps)) or not isinstance(core.model, models.BPE):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    of_vocabulary = _of_vocabulary(core, is_byte_level=is_byte_level)
    longest_added = _longest_added(core)
    if of_vocabulary is None or longest_added is None or (of_vocabulary.dropped and core.normalizer is not None):
        return None
    return TokenLength(shrinks * max(of_vocabulary.max_bytes, longest_added), of_vocabulary.dropped)


def _state(component: Any) -> dict[str, Any] | None:
    state: dict[str, Any] | None = None if component is None else json.loads(component.__getstate__())
    return state


def _steps(state: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, of sequences in it too."""
    if state is None:
        return []
    return [step for inner in state[key] for step in _steps(inner, key)] if state["type"] == "Sequence" else [state]


def _normalizer_shrinks(state: dict[str, Any] | None) -> int | None:
    """Return how many times shorter a normalized text may be, in bytes; None if there is no such number."""
    shrinks = 1
    for step in _steps(state, "normalizers"):
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif not (step["type"] == "Prepend" or (step["type"] == "Replace" and _replaces_by_longer(step))):
            return None
    return shrinks


def _replaces_by_longer(step: dict[str, Any]) -> bool:
    pattern = step["pattern"].get("String")
    return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts a text, or writes it in other characters."""
    return step["type"] in _KEEPS_ALL or (step["type"] in _MAY_REMOVE and step["behavior"] != "Removed")


def _of_vocabulary(core: Tokenizer, *, is_byte_level: bool) -> TokenLength | None:
    """Return the longest token of the vocabulary alone, and the bytes it lacks.

    Tokens of a byte-level vocabulary have a character for each byte. A byte without a token is dropped or becomes part
    of an unknown token. Tokens of other vocabularies are text in UTF-8, where "▁" may be a space or itself.
    """
    model, vocabulary = core.model, core.get_vocab(with_added_tokens=False)
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if is_byte_level:
        dropped = bytes(byte for char, byte in BYTE_LEVEL_ALPHABET.items() if char not in vocabulary)
        return TokenLength(max(map(len, vocabulary)), dropped)
    if model.byte_fallback and vocabulary.keys() >= _BYTE_TOKENS:
        return TokenLength(max(len(token.encode()) for token in vocabulary))
    return None


def _longest_added(core: Tokenizer) -> int | None:
    """Return the maximum bytes that a token outside of the vocabulary matches; None if one takes blanks around it
    along."""
    longest = 0
    for token in core.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip:
            return None
        longest = max(longest, len(token.content.encode()))
        if token.normalized and core.normalizer is not None:
            longest = max(longest, len(core.normalizer.normalize_str(token.content).encode()))
    return longest
