"""The tokens of a request with the experts that each of them chose, for the page's colours."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from moeflow.core.observation import NOT_COMPUTED, TokenQuestion, TokenSequence, TokenSight
from moeflow.server.errors import ApiError
from moeflow.server.served_model import ServedModel
from moeflow.server.stories.seen import numbers_of
from moeflow.server.stories.sentences import NOT_OBSERVED
from moeflow.server.stories.story import Story
from moeflow.text.output_text import Detokenizer
from moeflow.text.tokenizer import Tokenizer

_CODE: Final = "request_not_observed"


class RoutedToken(msgspec.Struct, frozen=True):
    """One token."""

    text: str  # characters that it completes: together they are the whole text
    role: Literal["prompt", "answer"]
    experts: str | None  # base64 of uint16 [L, K]; None: not computed, or not observed


class RoutedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one sequence of a request."""

    layers: list[int]  # numbers of the layers with routers
    num_experts: int
    top_k: int
    sequence: int  # of the request's sequences
    tokens: list[RoutedToken]


async def tokens_of(served: ServedModel | None, story: Story, number: int) -> RoutedTokens:
    """Return the tokens of a sequence of a request. Decoding takes place in a thread.

    Raises: ApiError 404 if it was not observed, or there is no such sequence.
    """
    if served is None or served.generator is None:
        raise _unknown("not loaded")
    generator = served.generator
    sights = await served.look(TokenQuestion(story.object_id))
    found = [sight for sight in sights.values() if isinstance(sight, TokenSight)]
    if not found:
        raise _unknown("no answer")
    sequences = {it.sequence_id: (sight, it) for sight in found for it in sight.sequences}
    if not sequences:
        raise _unknown("not watched")
    if number >= len(sequences):
        message = f"sequence must be less than {len(sequences)}: the engine knows so many sequences of the request"
        raise ApiError(404, _CODE, message)
    sight, sequence = sequences[sorted(sequences, key=numbers_of)[number]]
    tokens = await generator.lanes.run(len(sequence.token_ids), lambda: _routed(generator.tokenizer, sight, sequence))
    return RoutedTokens(
        layers=sight.layers, num_experts=sight.num_experts, top_k=sight.top_k, sequence=number, tokens=tokens
    )


def _unknown(why: str) -> ApiError:
    return ApiError(404, _CODE, f"The tokens are not known: {NOT_OBSERVED[why]}")


def _routed(tokenizer: Tokenizer, sight: TokenSight, sequence: TokenSequence) -> list[RoutedToken]:
    texts = texts_of(tokenizer, sequence.token_ids)
    experts = _experts(sight, sequence)
    num_prompt = sequence.num_prompt_tokens
    return [
        RoutedToken(text, "prompt" if place < num_prompt else "answer", chosen)
        for place, (text, chosen) in enumerate(zip(texts, experts, strict=True))
    ]


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the characters that each token completes, those of special tokens included."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.push(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts


def _experts(sight: TokenSight, sequence: TokenSequence) -> list[str | None]:
    number = len(sequence.token_ids)
    if not sequence.experts:
        return [None] * number
    chosen = np.frombuffer(sequence.experts, "<u2").reshape(number, len(sight.layers) * sight.top_k)
    is_known = (chosen != NOT_COMPUTED).any(axis=1)
    return [
        base64.b64encode(row.tobytes()).decode() if known else None for row, known in zip(chosen, is_known, strict=True)
    ]
