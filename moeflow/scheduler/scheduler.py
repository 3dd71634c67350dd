"""Continuous batching: the batch is made anew for every pass.

Each running request brings its next token (decode) or its next chunk of prompt (prefill). Waiting requests join as soon
as a place, blocks and tokens are left in the pass. When blocks run out, the youngest running request returns to the
head of the queue. It is recomputed later, from the part that the prefix tree still holds. First come, first served: no
request overtakes another, so none starves. (ExpertFlow 4.2; chunked prefill
as in Sarathi-Serve.)

Batch requests use the capacity that interactive ones leave. They are placed last in a pass and lose their blocks first.
While interactive requests run, a budget limits them (`latency_budget.py`). One that sits a pass out keeps its blocks. A
load that leaves nothing makes them wait for ever.

A pass is undone if it fails for data of some requests only. Its requests are recomputed one by one until each has its
next token, so that only the affected ones fail. Likewise requests that come
from an engine that died of one of them: each until it is past where that happened.

Where keys and values of prefixes are kept elsewhere, too, a request waits until they are read (`prefix_reads.py`), and
is overtaken meanwhile.

Knows no tensors, no text and no clock. The engine reports the result of a pass by `complete`, `fail` or `undo`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason, Request, RequestStatus
from moeflow.core.token_tree import TokenTree
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.state_slots import StateSlots
from moeflow.scheduler.batch_queue import BatchQueue
from moeflow.scheduler.draft_placement import with_trees
from moeflow.scheduler.latency_budget import LatencyBudget
from moeflow.scheduler.prefix_reads import PrefixReads
from moeflow.scheduler.prefix_source import PrefixSource

_NO_TREES: Final[Mapping[Request, TokenTree]] = MappingProxyType({})
_NONE_KEPT: Final[Mapping[Request, int]] = MappingProxyType({})


class _Plan(msgspec.Struct):
    """A pass in the making."""

    budget: int  # tokens that may still join
    entries: list[BatchEntry] = []
    has_preempted: bool = False  # for a request of the same kind: blocks are short, none is admitted

    def add(self, entry: BatchEntry) -> None:
        self.entries.append(entry)
        self.budget -= entry.num_rows


class Scheduler:
    """Owns the queues, the running requests and their block tables."""

    held_s = 0.0  # a pass can always run at once: later requests join the next

    def __init__(self, config: SchedulerConfig, prefixes: PrefixSource | None = None) -> None:
        """`prefixes` has keys and values of prefixes outside of KV blocks."""
        check_limits(config)
        self.config = config
        self.interactive: deque[Request] = deque()  # waiting
        self.batch_queue = BatchQueue(config.max_num_seqs, config.num_blocks * config.block_size)
        self.running: list[Request] = []  # in order of admission: the last of a kind is its first to be preempted
        self._alone: list[Request] = []  # waiting or running: each is to have passes of its own for a while
        self.num_preemptions = 0
        self.blocks = BlockTables(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
            num_kept=config.num_kept_blocks,
            states=StateSlots(config.states.num_slots, config.states.checkpoint_every) if config.states else None,
        )
        self._reads = PrefixReads(prefixes, self.blocks)
        self._latency = LatencyBudget()

    @property
    def waiting(self) -> list[Request]:
        """All requests that wait."""
        return [*self.interactive, *self.batch_queue]

    @property
    def has_work(self) -> bool:
        """Whether a pass would compute anything."""
        return bool(self.interactive or self.batch_queue or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool on its own: at most `max_model_len` tokens in the end."""
        assert request.status is RequestStatus.WAITING
        assert len(request.prompt_token_ids) + request.max_tokens <= self.config.max_model_len
        if request.is_batch:
            self.batch_queue.add(request)
        else:
            self.interactive.append(request)
        if request.isolated_until > len(request.output_token_ids):
            self._alone.append(request)
        self._reads.expect(request)

    def schedule(self, trees: Mapping[Request, TokenTree] = _NO_TREES) -> Batch:
        """Plan the next pass. Not empty as long as there is work, unless all of it waits for prefixes or late tokens.

        `trees` are drafted tokens of decoding requests. They use the remaining tokens and blocks of the pass.
        """
        batch, limit = self._schedule(), self.config.max_num_batched_tokens
        if not trees or self._alone:
            return batch
        return with_trees(batch, trees, limit, self.blocks, lambda: sum(map(self._may_grow, self.running)))

    def _schedule(self) -> Batch:
        self._reads.settle()
        plan = _Plan(self.config.max_num_batched_tokens)
        if self._alone:
            self._place_alone(plan, self._alone[0])
            return Batch(tuple(plan.entries))
        self._continue(plan, self._running(is_batch=False))
        has_room = not plan.has_preempted and self._admit_interactive(plan)
        self._place_batch_requests(plan, may_admit=has_room)
        return Batch(tuple(plan.entries))

    def complete(self, batch: Batch, elapsed_s: float = 0.0, num_kept: Mapping[Request, int] = _NONE_KEPT) -> None:
        """The pass went well: its tokens are computed. `elapsed_s` is its duration; 0: not measured.

        `num_kept` is the number of a request's drafted tokens that are kept.
        """
        num_batch = 0
        for entry in batch.entries:
            entry.request.num_computed_tokens = entry.stop + num_kept.get(entry.request, 0)
            num_batch += entry.num_rows if entry.request.is_batch else 0
            if entry.samples and entry.request in self._alone and self._is_cleared(entry.request):
                self._alone.remove(entry.request)
        self.blocks.confirm_pass()
        if elapsed_s:
            self._latency.note(batch.num_tokens - num_batch, num_batch, elapsed_s)

    def fail(self, batch: Batch) -> list[Request]:
        """The pass failed: its requests end with an error, nothing it wrote is ever reused. Returns them."""
        failed = [entry.request for entry in batch.entries]
        for request in failed:
            self.finish(request, FinishReason.ERROR)
        self.blocks.discard_pass()
        return failed

    def undo(self, batch: Batch) -> bool:
        """The pass failed, perhaps not for all of its requests: they are to be computed again, one by one.

        Requests that used prefixes computed by the pass for others return to the queue. Returns False, with nothing
        changed, if there is only one request: it failed.
        """
        if len(batch.entries) == 1:
            return False
        self._alone = [entry.request for entry in batch.entries]
        for request in sorted(self._alone, key=self.running.index, reverse=True):
            if self.blocks.rests_on_pass(request):
                self._send_back(request)
        self.blocks.discard_pass()
        return True

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request and free its resources."""
        if request in self._alone:
            self._alone.remove(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.blocks.close(request)
            if request.is_batch:
                self.batch_queue.note_answer(request)
        else:
            self._leave_queue(request)
        self._reads.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def check_integrity(self) -> None:
        """Prove the invariants of queues, running requests and blocks. AssertionError if one is broken."""
        assert all(r.status is RequestStatus.WAITING and not r.num_computed_tokens for r in self.waiting)
        assert set(self._alone) <= {*self.waiting, *self.running}
        assert not any(r.is_batch for r in self.interactive)
        assert all(r.is_batch for r in self.batch_queue)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert len({id(r) for r in (*self.waiting, *self.running)}) == len(self.waiting) + len(self.running)
        assert len(self._running(is_batch=False)) <= self.config.max_num_seqs
        assert len(self._running(is_batch=True)) <= self._max_batch
        assert all(self._reads.holds(r) <= (r.status is RequestStatus.WAITING) for r in (*self.waiting, *self.running))
        is_used = bool(self.running) or self._reads.is_reading
        assert is_used or self.blocks.num_used == 0, "blocks leaked: nobody runs, yet some are in use"
        self._reads.check_integrity()
        self.blocks.check_integrity()

    def _is_cleared(self, request: Request) -> bool:
        """Whether a request that has its next token may be computed with others again."""
        return len(request.output_token_ids) + 1 >= request.isolated_until

    def _running(self, *, is_batch: bool) -> list[Request]:
        return [request for request in self.running if request.is_batch is is_batch]

    def _place_alone(self, plan: _Plan, request: Request) -> None:
        """Plan one request, at any place of its queue."""
        if request.status is RequestStatus.RUNNING:
            self._continue(plan, [request])
        if request.status is RequestStatus.RUNNING or self._reads.holds(request):
            return
        while not self._open(request, is_alone=True):
            if not self.running:
                return
            self._preempt_youngest()
        if self._reads.begin(request):
            return
        self._leave_queue(request)
        self._begin(plan, request)

    def _continue(self, plan: _Plan, running: list[Request], num_kept: int = 0) -> None:
        """Plan running requests of one kind; when blocks run out, the youngest loses its own."""
        for request, num_tokens in self._shares(plan, running, num_kept):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one a moment ago
            while not self.blocks.reserve(request, request.num_computed_tokens + num_tokens):
                victim = self._preempt_youngest()
                plan.has_preempted |= victim.is_batch is request.is_batch
                if victim is request:
                    break
            else:
                plan.add(self._entry(request, num_tokens))

    def _shares(self, plan: _Plan, running: list[Request], num_kept: int) -> list[tuple[Request, int]]:
        """Split the pass among running requests: one token to every decode, the rest to prefills in order.

        Decodes are counted first so that a long prompt never stalls them. The list stays in order of admission, because
        preemption starts at its end. Places are short only for batch requests;
        `num_kept` of them are not for decodes.
        """
        num_places = self.config.max_num_seqs - len(plan.entries)
        decoding = [request for request in running if request.is_decoding][: min(num_places - num_kept, plan.budget)]
        budget = plan.budget - len(decoding)
        num_places -= len(decoding)
        chosen = set(decoding)
        shares: list[tuple[Request, int]] = []
        for request in running:
            if request in chosen:
                shares.append((request, 1))
            elif not request.is_decoding and budget > 0 and num_places > 0:
                num_tokens = _chunk(request, budget)
                if num_tokens:
                    budget -= num_tokens
                    num_places -= 1
                    shares.append((request, num_tokens))
        return shares

    def _admit_interactive(self, plan: _Plan) -> bool:
        """Admit interactive requests, oldest first, while places and tokens last and batch blocks can be had.

        Returns whether tokens and blocks did: who still waits then waits for a place, or for a prefix to be read.
        """
        num_begun = len(self._running(is_batch=False)) + sum(map(self._reads.holds, self.interactive))
        for request in [*self.interactive]:
            if self._reads.holds(request):
                continue
            if num_begun >= self.config.max_num_seqs:
                break
            if not _chunk(request, plan.budget):
                return False
            while not self._open(request):
                if not any(other.is_batch for other in self.running):
                    return False
                self._preempt_youngest()
            if not self._reads.begin(request):
                self.interactive.remove(request)
                self._begin(plan, request)
            num_begun += 1
        return True

    def _place_batch_requests(self, plan: _Plan, *, may_admit: bool) -> None:
        """Fill the rest of the pass, within the budget for slowing down interactive requests.

        New ones are let in only if no interactive request lacks tokens or blocks.
        """
        running = self._running(is_batch=True)
        if not running and not self.batch_queue:
            return
        has_interactive = bool(plan.entries)
        if has_interactive:
            plan.budget = self._room_beside_interactive(plan, running)
        plan.has_preempted = False
        is_place_kept = not has_interactive and self._has_prompts(running)
        self._continue(plan, running, num_kept=int(is_place_kept))
        if may_admit and not plan.has_preempted:
            self._admit_batch_requests(plan)
        if is_place_kept:  # and perhaps not taken: the next prompt may not have found its blocks
            # An omitted request is younger than all placed ones, so none of these loses its blocks for it.
            placed = {entry.request for entry in plan.entries}
            self._continue(plan, [request for request in running if request not in placed], num_kept=0)

    def _room_beside_interactive(self, plan: _Plan, running: list[Request]) -> int:
        """Return how many batch tokens may take part.

        Decodes save the most: in a pass of their own they would read all weights for little work. Prompts cost the same
        in any pass. If few requests decode, prompts come first.
        """
        num_places = self.config.max_num_seqs - len(plan.entries)
        num_interactive = self.config.max_num_batched_tokens - plan.budget
        num_decoding = min(sum(request.is_decoding for request in running), num_places, plan.budget)
        num_wanted = num_decoding
        if 2 * num_decoding < num_places:
            num_uncomputed = sum(request.num_uncomputed_tokens for request in running)
            num_wanted = plan.budget if self.batch_queue else min(plan.budget, num_uncomputed)
        return self._latency.room(num_interactive, num_wanted)

    @property
    def _max_batch(self) -> int:
        """How many batch requests may run.

        Once the engine is shared, twice as many. Prompts are computed ahead while no interactive request runs, because
        passes with interactive requests mostly omit prompts and need decodes.
        """
        return self.config.max_num_seqs * (2 if self._latency.is_shared else 1)

    def _has_prompts(self, running: list[Request]) -> bool:
        """Whether a batch prompt could be computed if one of the decodes left it a place."""
        if any(not request.is_decoding for request in running):
            return True
        held = self._held_batch()
        request = self.batch_queue.first(held)
        has_place = len(running) + len(held) < self._max_batch
        return request is not None and has_place and self._fits_to_the_end(request, held)

    def _held_batch(self) -> set[Request]:
        """Return the batch requests that wait for a prefix to be read."""
        return {request for request in self._reads.held if request.is_batch}

    def _fits_to_the_end(self, request: Request, held: Collection[Request]) -> bool:
        """Whether memory probably suffices for a batch request, its predecessors and all running ones until their
        answers end.

        The condition is algorithm 2's, with the running requests as the open micro-batch.
        """
        num_needed = sum(self._blocks_in_the_end(one) for one in (*self.running, *held, request))
        return not self.running or num_needed <= self.config.num_blocks

    def _admit_batch_requests(self, plan: _Plan) -> None:
        """Admit batch requests while memory suffices.

        A request that waits for a prefix read is skipped and keeps its place before later ones.
        """
        passed_by = self._held_batch()
        num_running = len(self._running(is_batch=True))
        while len(plan.entries) < self.config.max_num_seqs and num_running + len(passed_by) < self._max_batch:
            request = self.batch_queue.first(passed_by)
            if request is None or not _chunk(request, plan.budget) or not self._fits_to_the_end(request, passed_by):
                return
            if not self._open(request):
                return
            if self._reads.begin(request):
                passed_by.add(request)
                continue
            self.batch_queue.remove(request)
            self._begin(plan, request)
            num_running += 1

    def _blocks_in_the_end(self, request: Request) -> int:
        num_tokens = self.batch_queue.expected_tokens(request) if request.is_batch else request.num_tokens
        return self.blocks.blocks_for(num_tokens)

    def _open(self, request: Request, *, is_alone: bool = False) -> bool:
        """Give a waiting request its blocks; returns False, with nothing changed, if there are not enough.

        The whole prompt gets its blocks at once, and one block is left for every running request that may need another.
        Else the next pass could preempt the newcomer after its prefill. Batch requests take
        none from interactive ones.
        """
        rivals = self.running if request.is_batch else self._running(is_batch=False)
        keep_available = 0 if is_alone else sum(map(self._may_grow, rivals))
        num_cached = self.blocks.open(request, reuse=not request.needs_whole_prompt)
        if not self.blocks.reserve(request, request.num_tokens, keep_available=keep_available):
            self.blocks.close(request)
            return False
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        return True

    def _may_grow(self, request: Request) -> bool:
        """Return whether a running request may need blocks beside its own; its very last token is never computed."""
        return self.blocks.lacks(request, len(request.prompt_token_ids) + request.max_tokens - 1)

    def _begin(self, plan: _Plan, request: Request) -> None:
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        plan.add(self._entry(request, _chunk(request, plan.budget)))

    def _entry(self, request: Request, num_tokens: int) -> BatchEntry:
        start = request.num_computed_tokens
        stop = start + num_tokens
        self.blocks.share(request, stop)
        block_ids = self.blocks.block_ids(request, stop)
        samples = stop == request.num_tokens and request.pooling is None
        state = self.blocks.state_use(request)
        return BatchEntry(request, start, num_tokens, block_ids, samples=samples, state=state)

    def _preempt_youngest(self) -> Request:
        """Send the last admitted batch request, else the last of all, back to the head of its queue.

        Its blocks are free at once.
        """
        request = next((it for it in reversed(self.running) if it.is_batch), self.running[-1])
        self._send_back(request)
        self.num_preemptions += 1
        return request

    def _send_back(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.close(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if request.is_batch:
            self.batch_queue.put_back(request)
        else:
            self.interactive.appendleft(request)
        self._reads.expect(request)

    def _leave_queue(self, request: Request) -> None:
        if request.is_batch:
            self.batch_queue.remove(request)
        else:
            self.interactive.remove(request)


def _chunk(request: Request, budget: int) -> int:
    """Return the number of a request's tokens for a pass with this capacity; 0: it waits for more."""
    num_tokens = min(request.num_uncomputed_tokens, budget)
    return num_tokens if request.num_computed_tokens + num_tokens >= request.num_together else 0


def check_limits(config: SchedulerConfig) -> None:
    """Raises: ConfigError if the limits contradict each other."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) is below max_num_seqs ({config.max_num_seqs}): "
            "a pass must hold one token of every running request; raise the first or lower the second"
        )
    capacity = config.num_blocks * config.block_size
    if config.max_model_len > capacity:
        raise ConfigError(
            f"one request may have {config.max_model_len} tokens, but the KV cache holds {capacity}: "
            "enlarge the KV cache or lower max_model_len"
        )
