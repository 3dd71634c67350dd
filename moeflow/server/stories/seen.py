"""Passes and experts of a request, as far as its engines observed them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moeflow.core.engine_messages import ModelInfo, TokenOutput
from moeflow.core.observation import PassSight, RequestQuestion, RequestSight, SeenDrafts, SequenceSight
from moeflow.server.served_model import ServedModel
from moeflow.server.stories.sentences import NOT_OBSERVED
from moeflow.server.stories.story import Story
from moeflow.text.drafted_passes import DraftedPass, DraftTexts
from moeflow.text.tokenizer import Tokenizer


class Pass(msgspec.Struct, frozen=True):
    """One pass of an engine with tokens of the request."""

    start_s: float  # from the start of the request
    duration_s: float
    tokens: int  # of the request, without drafted ones
    pass_tokens: int  # of all requests, drafted ones included
    is_prompt: bool  # whether prompt tokens of the request were in it
    drafted_tokens: int
    accepted_tokens: int  # of these
    stall_s: float  # that it waited for experts
    read_bytes: int  # of experts, meanwhile


class Experts(msgspec.Struct, frozen=True):
    """The tokens that each expert got of the request, drafted ones included."""

    layers: list[int]  # numbers of the layers with routers
    num_experts: int
    top_k: int  # that a token's router chooses
    counts: list[list[int]]  # of each layer, each expert


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a request from its engines. None: they did not observe it."""

    passes: list[Pass] | None = None
    experts: Experts | None = None
    token_trees: list[DraftedPass] | None = None  # passes of the first sequence; None also if nothing was drafted
    read_bytes: int | None = None
    stall_s: float | None = None
    queued_s: float | None = None  # of the first sequence; known here before the first token
    replica: int | None = None  # the place of the engine in /stats
    host: str | None = None  # its machine; "": the server's
    not_observed: str = ""  # the missing part with the reason; empty: nothing is missing


async def seen_of(served: ServedModel | None, story: Story) -> Seen:
    """Ask the engines of a model about a request; they observe their passes then for a while."""
    if story.state == "refused":
        return Seen()
    if served is None or served.generator is None:
        return Seen(not_observed=NOT_OBSERVED["not loaded"])
    sights = await served.look(RequestQuestion(story.object_id))
    known = {place: sight for place, sight in sights.items() if isinstance(sight, RequestSight)}
    if not known:
        return Seen(not_observed=NOT_OBSERVED["no answer"])
    having = {place: sight for place, sight in known.items() if sight.sequences}
    if not having:
        return Seen(not_observed=NOT_OBSERVED["not watched"])
    return await _told(served, story, having)


async def _told(served: ServedModel, story: Story, having: dict[int, RequestSight]) -> Seen:
    begun_s = next((it.start_s for it in story.phases if it.name in ("queued", "waiting")), 0.0)
    passes = sorted(
        (one for sight in having.values() for one in _passes(sight.sequences, begun_s)), key=lambda one: one.start_s
    )
    sequences = [sequence for sight in having.values() for sequence in sight.sequences]
    has_experts = any(sight.layers for sight in having.values())
    replica, *others = having
    statuses = served.replicas()  # one may have been removed since it answered
    return Seen(
        passes=passes,
        experts=_experts(served.info, having),
        token_trees=await _token_trees(served, min(sequences, key=lambda sequence: numbers_of(sequence.sequence_id))),
        read_bytes=sum(one.read_bytes for one in passes),
        stall_s=sum(one.stall_s for one in passes),
        queued_s=min(sequence.queued_s for sequence in sequences),
        replica=None if others else replica,
        host=None if others or replica >= len(statuses) else statuses[replica].host,
        not_observed=NOT_OBSERVED["partly watched"] if _is_partial(story, sequences, has_experts) else "",
    )


def _passes(sequences: Sequence[SequenceSight], begun_s: float) -> list[Pass]:
    """Return the passes of one engine: sequences of a request share them. The first sequence was submitted then."""
    first_s = min(sequence.submitted_s for sequence in sequences)
    rows = [
        (begun_s + sequence.submitted_s - first_s + one.start_s, one)
        for sequence in sequences
        for one in sequence.passes
    ]
    passes: list[Pass] = []
    for start_s, one in sorted(rows, key=lambda row: row[0]):
        if passes and start_s < passes[-1].start_s + passes[-1].duration_s / 2:  # passes of an engine do not overlap
            passes[-1] = _joined(passes[-1], one)
        else:
            passes.append(_pass(start_s, one))
    return passes


def _pass(start_s: float, one: PassSight) -> Pass:
    return Pass(
        start_s=start_s,
        duration_s=one.duration_s,
        tokens=one.num_tokens,
        pass_tokens=one.num_pass_tokens,
        is_prompt=one.is_prompt,
        drafted_tokens=one.num_drafted,
        accepted_tokens=one.num_accepted,
        stall_s=one.stall_s,
        read_bytes=one.read_bytes,
    )


def _joined(shared: Pass, one: PassSight) -> Pass:
    """Add another sequence's part in the same pass."""
    return msgspec.structs.replace(
        shared,
        tokens=shared.tokens + one.num_tokens,
        is_prompt=shared.is_prompt or one.is_prompt,
        drafted_tokens=shared.drafted_tokens + one.num_drafted,
        accepted_tokens=shared.accepted_tokens + one.num_accepted,
    )


def _experts(model: ModelInfo, having: dict[int, RequestSight]) -> Experts | None:
    """Return the sum over all sequences; None: the model has no experts, or those of all sequences are forgotten."""
    sight = next(iter(having.values()))
    known = [np.frombuffer(it.counts, "<i8") for one in having.values() for it in one.sequences if it.counts]
    if not known:
        return None
    counts = sum(known)
    rows = np.reshape(counts, (-1, sight.num_experts)).tolist()
    return Experts(sight.layers, sight.num_experts, model.lossy_top_k or model.top_k, rows)


async def _token_trees(served: ServedModel, sequence: SequenceSight) -> list[DraftedPass] | None:
    """Return the passes of a sequence with their drafts, as text, which is made in a thread; None: there are none."""
    if not sequence.drafts:
        return None
    generator = served.loaded
    return await generator.lanes.run(
        len(sequence.output_token_ids), lambda: drafted_passes(generator.tokenizer, sequence)
    )


def drafted_passes(tokenizer: Tokenizer, sequence: SequenceSight) -> list[DraftedPass]:
    """Return the passes of a sequence. One without drafts brings one token; another its accepted ones, and one more."""
    all_drafts = [msgspec.msgpack.decode(encoded, type=SeenDrafts) for encoded in sequence.drafts]
    trees = {drafts.first: drafts.tree for drafts in all_drafts}
    texts, token_ids, passes, first = DraftTexts(tokenizer), sequence.output_token_ids, list[DraftedPass](), 0
    while first < len(token_ids):
        tree = trees.get(first)
        brought = token_ids[first : first + 1 + (0 if tree is None else len(tree.accepted))]
        output = TokenOutput(request_id=sequence.sequence_id, token_ids=brought, drafted_tree=tree)
        found = texts.push(output, len(brought))
        assert found is not None, "it brought a token"
        passes.append(found)
        first += len(brought)
    return passes


def numbers_of(sequence_id: str) -> tuple[int, ...]:
    """Return the numbers of prompt and completion at the end of a sequence's id."""
    return tuple(int(number) for number in sequence_id.rsplit("-", 2)[1:])


def _is_partial(story: Story, sequences: Sequence[SequenceSight], has_experts: bool) -> bool:
    """Return whether some tokens were computed without being observed, or their experts are forgotten.

    A sequence's last token is not computed.
    """
    if len(sequences) < story.sequences or (has_experts and not all(it.counts for it in sequences)):
        return True
    return any(
        sum(one.num_tokens + one.num_accepted for one in it.passes)
        < it.num_prompt_tokens - it.num_cached_tokens + it.num_output_tokens - 1
        for it in sequences
    )
