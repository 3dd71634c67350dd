"""Which of a pass's drafted tokens are kept, and what follows them.

A drafted token is accepted if it equals the token that the request samples there, from the model's logits with the
random number of its position. So drafts never change a token, greedy or sampled: the distribution is the model's, and a
seed gives the same answer with and without speculation. A tree of distinct drafts is accepted with the model's total
probability of its tokens, the maximum of any rule. SpecInfer's multi-round rejection sampling accepts as many of drafts
that were not drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request
from moeflow.core.token_mask import TokenMask
from moeflow.core.token_tree import ROOT
from moeflow.engine.row_edits import SampledRow
from moeflow.engine.sampler import SampledToken, sample
from moeflow.kernels.arrays import Array
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.engine import logprobs as token_logprobs

Masks = Mapping[Request, Sequence[TokenMask | None]]
_NO_MASKS: Final[Masks] = MappingProxyType({})


class Verified(msgspec.Struct, frozen=True):
    """What a pass brought for one request."""

    tokens: list[SampledToken]  # at least one; only the last may be an error
    kept: list[int]  # nodes of its tree that the first tokens are, one after another: all of these but the last


def verify(logits: Array, entries: Sequence[BatchEntry], masks: Masks = _NO_MASKS) -> list[Verified]:
    """Return what entries that sample bring. `masks` has one for each row of requests whose answers have a form.

    Shapes: logits [R, V] float32; of each entry that of its last token, then those of its tree's nodes. Not changed.
    """
    rows = [
        SampledRow(entry.request, path, mask)
        for entry in entries
        for path, mask in zip(entry.tree.paths, masks.get(entry.request, [None] * entry.num_sampled), strict=True)
    ]
    sampled = sample(logits, rows)
    found: list[Verified] = []
    kept_rows: list[list[int]] = []
    first = 0
    for entry in entries:
        last = first + entry.num_sampled
        kept = _kept(entry, sampled[first:last])
        kept_rows.append([first, *[first + 1 + node for node in kept]])
        found.append(Verified([sampled[row] for row in kept_rows[-1]], kept))
        first = last
    _add_logprobs(logits, entries, found, kept_rows)
    return found


def _kept(entry: BatchEntry, sampled: Sequence[SampledToken]) -> list[int]:
    """Return the nodes on the way that the sampled tokens go: those of row 0, then of the nodes that they are."""
    kept: list[int] = []
    node = ROOT
    while (child := entry.tree.child(node, sampled[node + 1].token_id)) is not None:
        kept.append(child)
        node = child
    return kept


def _add_logprobs(
    logits: Array, entries: Sequence[BatchEntry], found: Sequence[Verified], rows: Sequence[Sequence[int]]
) -> None:
    """Add the log-probabilities that requests ask for, as far as tokens lack them, of all in one go."""
    asked = [
        (one, place, row, entry.request.sampling.logprobs)
        for entry, one, entry_rows in zip(entries, found, rows, strict=True)
        for place, row in enumerate(entry_rows)
        if entry.request.sampling.logprobs is not None and one.tokens[place].error is None
        if one.tokens[place].logprobs is None
    ]
    if not asked:
        return
    token_ids = [one.tokens[place].token_id for one, place, _, _ in asked]
    asked_logits, num_top = logits[[row for _, _, row, _ in asked]], [number for *_, number in asked]
    logprobs = token_logprobs.logprobs_of(asked_logits, token_ids, num_top)
    for (one, place, _, _), each in zip(asked, logprobs, strict=True):
        one.tokens[place] = replace(one.tokens[place], logprobs=each)
