"""Log-probabilities in OpenAI's two forms: a list of tokens (chat, responses), parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from moeflow.text.output_text import TokenText, TopToken
from moeflow.text.token_bytes import token_label

_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for "never"


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was chosen, with the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion: element i of each list belongs to token i."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token begins in the choice's text, in characters


def listed_logprobs(tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
    """Return tokens as a list of `TokenLogprob`."""
    return [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Return tokens as chat completions report them."""
    return {"content": listed_logprobs(tokens), "refusal": None}


def _entry(token: TokenText | TopToken) -> dict[str, Any]:
    return {"token": token_label(token.utf8), "logprob": _finite(token.logprob), "bytes": list(token.utf8)}


class CompletionLogprobsWriter:
    """Writes one choice's tokens, piece by piece, knowing how much text went before."""

    def __init__(self) -> None:
        self._offset = 0

    def write(self, tokens: Sequence[TokenText | bytes]) -> dict[str, Any]:
        """Return the parallel lists for these tokens; bare bytes are a token without a log-probability."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            utf8 = token if isinstance(token, bytes) else token.utf8
            lists["tokens"].append(token_label(utf8))
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(None if isinstance(token, bytes) else _finite(token.logprob))
            lists["top_logprobs"].append(None if isinstance(token, bytes) else _tops(token))
            self._offset += sum(byte & 0xC0 != 0x80 for byte in utf8)  # bytes that begin a character
        return lists


def _tops(token: TokenText) -> dict[str, float]:
    chosen = {token_label(token.utf8): _finite(token.logprob)}
    return {token_label(top.utf8): _finite(top.logprob) for top in token.top} | chosen


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
