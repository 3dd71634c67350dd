"""What the engines of a model have counted of their experts, and the sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.core.observation import TIERS, ExpertSight, RoutedTokens

Table = NDArray[np.int64]  # [layers with routers, experts]


def table_of(numbers: bytes, sight: ExpertSight) -> Table | None:
    """Return an array of an answer; None: the engine has no such numbers."""
    return np.frombuffer(numbers, "<i8").reshape(len(sight.layers), -1) if numbers else None


def sum_of_tables(sights: Sequence[ExpertSight], name: str) -> Table | None:
    """Return the sum of a field of answers, such as `hits`; None if no engine has it."""
    found = [table for sight in sights if (table := table_of(getattr(sight, name), sight)) is not None]
    return sum(found[1:], found[0]) if found else None


def sum_of_tokens(parts: Sequence[RoutedTokens]) -> RoutedTokens:
    """Return the tokens that the experts of several engines got."""
    if len(parts) == 1:
        return parts[0]
    counts = np.sum([np.frombuffer(part.counts, "<i8") for part in parts], axis=0)
    of_layers = sums_of_places([part.tokens_of_layers for part in parts])
    return RoutedTokens(sum(part.tokens for part in parts), of_layers, counts.astype("<i8").tobytes())


def sums_of_places(lists: Sequence[list[int]]) -> list[int]:
    """Return the sums of lists of the same length, place by place."""
    return [sum(numbers) for numbers in zip(*lists, strict=True)]


def as_json(sights: Sequence[ExpertSight]) -> dict[str, Any]:
    """Return the sums over engines as `GET /stats/experts` has them; places of experts are those of the first engine.

    All answers are of one model, so they have the same layers.
    """
    first = sights[0]
    return {
        "layers": first.layers,
        "num_encoder_layers": first.num_encoder_layers,
        "num_experts": first.num_experts,
        "top_k": first.top_k,
        "is_counting": first.is_counting,
        "counted_s": max(sight.counted_s for sight in sights),
        "num_passes": sum(sight.num_passes for sight in sights),
        "total": _tokens_json([sight.total for sight in sights], first),
        "last_pass": _tokens_json([sight.last_pass for sight in sights], first),
        "last_minute": _tokens_json([sight.last_minute for sight in sights], first),
        "tiers": list(TIERS),
        "residency": np.frombuffer(first.residency, np.uint8).reshape(len(first.layers), -1).tolist()
        if first.layers
        else [],
        "hits": _listed(sum_of_tables(sights, "hits")),
        "misses": _listed(sum_of_tables(sights, "misses")),
        "read_bytes": sum(sight.read_bytes for sight in sights),
        "stall_s": sum(sight.stall_s for sight in sights),
        "not_counted": "; ".join(dict.fromkeys(sight.not_counted for sight in sights if sight.not_counted)),
    }


def _tokens_json(parts: Sequence[RoutedTokens], first: ExpertSight) -> dict[str, Any]:
    total = sum_of_tokens(parts)
    counts = table_of(total.counts, first)
    return {
        "tokens": total.tokens,
        "tokens_of_layers": total.tokens_of_layers,
        "counts": [] if counts is None else counts.tolist(),
    }


def _listed(table: Table | None) -> list[list[int]] | None:
    return None if table is None else table.tolist()
