"""The bytes that a token stands for, whatever its neighbours.

A token may hold part of a character only, so text is assembled from bytes. The rule follows from
the tokenizer's decoder, as `tokenizer.json` describes it. Knows nothing of token ids or of special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

ByteRule = Callable[[str], bytes]  # a token as the vocabulary spells it -> its bytes


def byte_rule(decoder_json: str | None) -> ByteRule | None:
    """Return the rule of a decoder, or None if tokens of this decoder have no bytes of their own."""
    if decoder_json is None:
        return _spaced_words
    steps = _flatten(json.loads(decoder_json))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    replaced = [(step["pattern"].get("String", ""), step["content"]) for step in steps if step["type"] == "Replace"]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    return _sentence_piece(replaced, has_byte_tokens="ByteFallback" in kinds)


def token_label(utf8: bytes) -> str:
    """Return a token's text; for a piece of a character, its bytes in OpenAI's notation, so that labels differ."""
    try:
        return utf8.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    spelled = [BYTE_LEVEL_ALPHABET.get(character) for character in token]
    # added tokens are written as plain text: one character outside the alphabet gives them away
    return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


def _sentence_piece(replaced: list[tuple[str, str]], *, has_byte_tokens: bool) -> ByteRule:
    def rule(token: str) -> bytes:
        if has_byte_tokens and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        for old, new in replaced:
            token = token.replace(old, new) if old else token
        return token.encode()

    return rule


def _spaced_words(token: str) -> bytes:
    """A tokenizer without decoder joins its tokens with spaces."""
    return b" " + token.encode()
