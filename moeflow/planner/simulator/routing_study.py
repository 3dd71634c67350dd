"""A routing profile from a text's routing, replayed at several sizes of the expert cache and of passes.

The sequences of a decoding batch are parts of the text. Each is prefilled up to its last tokens, which are then decoded
one by one. So passes find the cache as the prompt and the steps before left it, as in a serving model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.policies import DEFAULT_POLICY
from moeflow.experts.predict.registry import NO_PREDICTOR
from moeflow.planner.costs.model_costs import expected_distinct
from moeflow.planner.costs.routing_profile import SHARES_ON_DISK, PassReads, RoutingProfile
from moeflow.planner.simulator.cache_replay import (
    MIN_SLOTS,
    ReplayCase,
    ReplayMachine,
    replay,
)
from moeflow.planner.simulator.replayed_passes import ReplayedPass, prepare_passes
from moeflow.workload.routing_trace import ExpertIds, RoutingTrace, TraceHeader

BATCH_SIZES: Final = (1, 4, 16, 64)
PROMPT_TOKENS: Final = (128, 512, 2048)  # of a pass over prompts
ROUND_TOKENS: Final = 320  # of a sequence at most, before the next one
PROMPT_SHARE: Final = 0.8  # of a sequence
_ANY: Final = ReplayMachine(disk_bytes_per_s=1e9, slab_bytes=1)  # only the number of reads counts


def study_routing(
    ids: ExpertIds, header: TraceHeader, on_done: Callable[[int, int], None] = lambda *_: None
) -> RoutingProfile:
    """Return the profile of a text's routing, [layers, tokens, K], for the default expert cache.

    Blocks: for seconds, longer with more experts. `on_done` gets the numbers of finished and of all studies.
    """
    num_tokens = ids.shape[1]
    batches = [size for size in BATCH_SIZES if size * 4 <= num_tokens]
    prompts = [size for size in PROMPT_TOKENS if size * 2 <= num_tokens] or [max(num_tokens // 2, 1)]
    studies = [list(_decode_passes(ids, size)) for size in batches] + [list(_prompt_passes(ids, it)) for it in prompts]
    found: dict[_PassKind, PassReads] = {}
    for done, passes in enumerate(studies, 1):
        found |= _study(passes, header)
        on_done(done, len(studies))
    return msgspec.structs.replace(_profile(found, num_tokens), cold=cold_choices(ids, header.num_experts))


def cold_choices(ids: ExpertIds, num_experts: int) -> tuple[float, ...]:
    """Return the share of choices that the least popular experts get, for each of SHARES_ON_DISK.

    The first half of the text, [layers, tokens, K], tells which experts are popular, and the second half counts.
    """
    middle = ids.shape[1] // 2
    known, later = (_counts(part, num_experts) for part in (ids[:, :middle], ids[:, middle:]))
    in_order = np.take_along_axis(later, np.argsort(known, axis=1, kind="stable"), axis=1)  # the least popular first
    reached = np.concatenate([[0.0], np.cumsum(in_order.sum(axis=0)) / max(int(in_order.sum()), 1)])
    return tuple(np.interp(np.multiply(SHARES_ON_DISK, num_experts), np.arange(num_experts + 1), reached).tolist())


def _counts(ids: ExpertIds, num_experts: int) -> NDArray[np.int64]:
    """Return how often each expert of each layer was chosen: [layers, experts]."""
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in ids])


def study_trace(trace: RoutingTrace) -> RoutingProfile:
    """Return the profile of recorded passes in their order; sizes are rounded to powers of two.

    Raises: ConfigError if the trace has no passes.
    """
    passes = prepare_passes(trace, 1.0)  # without prefetches, times change no hits
    sizes = [routed.ids.shape[1] for routed in trace.passes]
    are_decode = [routed.num_generated == size for routed, size in zip(trace.passes, sizes, strict=True)]
    kinds = [
        _PassKind(is_decode, 2 ** round(math.log2(size))) for is_decode, size in zip(are_decode, sizes, strict=True)
    ]
    return _profile(_study(list(zip(passes, kinds, strict=True)), trace.header), sum(sizes))


class _PassKind(NamedTuple):
    """The kind of a pass; passes of one kind are counted as one."""

    is_decode: bool
    num_tokens: int


_Counted = tuple[ReplayedPass, _PassKind | None]  # None: it only fills the cache


def _decode_passes(ids: ExpertIds, batch_size: int) -> Iterator[_Counted]:
    """Yield rounds of so many sequences: their prompts, then a token of each at a time."""
    length = min(ids.shape[1] // batch_size, ROUND_TOKENS)
    prompt = min(int(length * PROMPT_SHARE), length - 1)
    for start in range(0, ids.shape[1] - batch_size * length + 1, batch_size * length):
        texts = ids[:, start : start + batch_size * length].reshape(ids.shape[0], batch_size, length, -1)
        prompts = texts[:, :, :prompt].reshape(ids.shape[0], batch_size * prompt, -1)
        for begin in range(0, batch_size * prompt, max(PROMPT_TOKENS)):
            yield ReplayedPass(prompts[:, begin : begin + max(PROMPT_TOKENS)]), None
        for place in range(prompt, length):
            yield ReplayedPass(texts[:, :, place]), _PassKind(True, batch_size)


def _prompt_passes(ids: ExpertIds, num_tokens: int) -> Iterator[_Counted]:
    """Yield the text in parts of one size; the first finds an empty cache and does not count."""
    for start in range(0, ids.shape[1] - num_tokens + 1, num_tokens):
        yield ReplayedPass(ids[:, start : start + num_tokens]), _PassKind(False, num_tokens) if start else None


def _study(passes: Sequence[_Counted], header: TraceHeader) -> dict[_PassKind, PassReads]:
    """Replay passes in their order at all sizes of the cache; return the used and read experts of each kind."""
    total = header.num_layers * header.num_experts
    even: dict[_PassKind, float] = {}
    distinct: Counter[_PassKind] = Counter()
    reads: dict[_PassKind, list[float]] = {kind: [] for _, kind in passes if kind is not None}
    for one, kind in passes:
        if kind is not None:
            more = header.num_layers * expected_distinct(header.num_experts, header.top_k, one.num_tokens)
            even[kind] = even.get(kind, 0.0) + more
            distinct[kind] += sum(map(len, one.needed))
    for share in SHARES_ON_DISK:
        case = ReplayCase(max(round(total * (1 - share)), MIN_SLOTS), DEFAULT_POLICY, NO_PREDICTOR)
        num_read: Counter[_PassKind | None] = Counter()
        for (_, kind), number in zip(
            passes, replay([it for it, _ in passes], header, _ANY, case).num_read, strict=True
        ):
            num_read[kind] += number
        for kind, found in reads.items():
            found.append(num_read[kind] / even[kind])
    return {kind: PassReads(kind.num_tokens, distinct[kind] / even[kind], tuple(it)) for kind, it in reads.items()}


def _profile(found: Mapping[_PassKind, PassReads], num_tokens: int) -> RoutingProfile:
    decode, prefill = (
        tuple(found[kind] for kind in sorted(found) if kind.is_decode is is_decode) for is_decode in (True, False)
    )
    return RoutingProfile(decode=decode, prefill=prefill, num_tokens=num_tokens)
