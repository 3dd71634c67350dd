"""Checks of embeddings."""

from __future__ import annotations

import base64
import struct
from typing import Any

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.openai_shapes import Embeddings, ErrorAnswer
from moeflow.cli.check.outcome import expect, expect_equal
from moeflow.cli.check.target import Target

_PATH = "/v1/embeddings"
_TEXTS = ["Grass is green.", "The sea is blue.", "Grass is green."]


def _ask(target: Target, **changes: Any) -> Embeddings:
    return target.ask(
        _PATH, {"model": target.model, "input": _TEXTS, "encoding_format": "float", **changes}, Embeddings
    )


def _vectors(answer: Embeddings) -> list[list[float]]:
    for item in answer.data:
        expect(isinstance(item.embedding, list), "a vector must be a list of numbers")
    return [item.embedding for item in answer.data if isinstance(item.embedding, list)]


def required_fields(target: Target) -> None:
    """Each text has a vector of the same length, in order."""
    answer = _ask(target)
    expect_equal([item.index for item in answer.data], [0, 1, 2], "indexes")
    lengths = {len(vector) for vector in _vectors(answer)}
    expect(len(lengths) == 1 and lengths != {0}, f"all vectors must have one length, not {lengths}")
    expect(0 < answer.usage.prompt_tokens <= answer.usage.total_tokens, "prompt_tokens must be 1 to total_tokens")


def equal_texts(target: Target) -> None:
    """Equal texts have equal vectors."""
    first, _, third = _vectors(_ask(target))
    expect(_are_close(first, third), "the vectors of equal texts must be equal")


def base64_format(target: Target) -> None:
    """A vector as base64 is the same as float32 numbers."""
    packed = _ask(target, encoding_format="base64").data[0].embedding
    expect(isinstance(packed, str), "a vector as base64 must be a text")
    data = base64.b64decode(str(packed))
    numbers = list(struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4]))
    expect(_are_close(numbers, _vectors(_ask(target))[0]), "base64 and numbers must be the same vector")


def _are_close(first: list[float], second: list[float]) -> bool:
    largest = max(map(abs, first), default=0)
    return len(first) == len(second) and all(abs(a - b) <= 1e-3 * largest for a, b in zip(first, second, strict=True))


def bad_requests(target: Target) -> None:
    """A missing or wrong input gets 400 and an error object."""
    wrong: tuple[dict[str, Any], ...] = ({}, {"input": {}}, {"input": []})
    for fields in wrong:
        answer = target.post(_PATH, {"model": target.model, **fields})
        expect(answer.status == 400, f"the status must be 400, not {answer.shown()}")
        answer.read(ErrorAnswer)


def embeddings_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("embeddings", _PATH), "OpenAI API reference: embeddings, create"
    return [
        area.check(required_fields, source, optional=True),  # most models have no vectors
        area.check(equal_texts, source, optional=True),
        area.check(base64_format, f"{source}, encoding_format", optional=True),
        area.check(bad_requests, "OpenAI API reference: errors"),
    ]
