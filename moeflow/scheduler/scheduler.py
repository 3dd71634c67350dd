"""Continuous batching: the batch is made anew for every pass.

Each running request brings its next token (decode) or its next chunk of prompt (prefill); whoever waits
joins as soon as a place, blocks and tokens are left in the pass. When blocks run out, the youngest running
request goes back to the head of the queue and is computed again later, from whatever of it the prefix tree
still holds. First come, first served: nobody overtakes, so nobody starves. (ExpertFlow 4.2; chunked prefill
as in Sarathi-Serve.)

Knows no tensors, no text and no clock. Whoever runs the pass reports back through `complete` or `fail`.
"""

from __future__ import annotations

from collections import deque

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason, Request, RequestStatus
from moeflow.kvcache.block_tables import BlockTables


class Scheduler:
    """Owns the queue, the running requests and their block tables."""

    held_s = 0.0  # a pass can always be run at once: whoever comes later joins the next

    def __init__(self, config: SchedulerConfig) -> None:
        check_limits(config)
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission: the last is the first to be preempted
        self.num_preemptions = 0
        self.blocks = BlockTables(
            num_blocks=config.num_blocks, block_size=config.block_size, prefix_caching=config.prefix_caching
        )

    @property
    def has_work(self) -> bool:
        """Whether a pass would compute anything."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool on its own: at most `max_model_len` tokens in the end."""
        assert request.status is RequestStatus.WAITING
        assert len(request.prompt_token_ids) + request.max_tokens <= self.config.max_model_len
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """Plan the next pass. Not empty as long as there is work."""
        entries: list[BatchEntry] = []
        budget = self.config.max_batch_tokens
        preempted_any = False
        for request, num_tokens in self._share_of_running():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one a moment ago
            while not self.blocks.reserve(request, request.num_computed_tokens + num_tokens):
                preempted_any = True
                if self._preempt_youngest() is request:
                    break
            else:
                entries.append(self._entry(request, num_tokens))
                budget -= num_tokens
        if not preempted_any:
            self._admit(entries, budget)
        return Batch(tuple(entries))

    def complete(self, batch: Batch) -> None:
        """The pass went well: its tokens are computed."""
        for entry in batch.entries:
            entry.request.num_computed_tokens = entry.stop
        self.blocks.confirm_pass()

    def fail(self, batch: Batch) -> list[Request]:
        """The pass failed: its requests end with an error, nothing it wrote is ever reused. Returns them."""
        failed = [entry.request for entry in batch.entries]
        for request in failed:
            self.finish(request, FinishReason.ERROR)
        self.blocks.discard_pass()
        return failed

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request and free what it holds."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.blocks.close(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def check_integrity(self) -> None:
        """Prove the invariants of queue, running requests and blocks. AssertionError if one is broken."""
        assert all(r.status is RequestStatus.WAITING and not r.num_computed_tokens for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert len({id(r) for r in (*self.waiting, *self.running)}) == len(self.waiting) + len(self.running)
        assert len(self.running) <= self.config.max_running
        assert self.running or self.blocks.num_used == 0, "blocks leaked: nobody runs, yet some are in use"
        self.blocks.check_integrity()

    def _share_of_running(self) -> list[tuple[Request, int]]:
        """Split the pass among running requests: one token to every decode, the rest to prefills in order.

        Decodes come first in the count so that a long prompt never stalls them, yet the list stays in order
        of admission, because blocks are taken from its end.
        """
        budget = self.config.max_batch_tokens - sum(r.is_decoding for r in self.running)
        shares: list[tuple[Request, int]] = []
        for request in self.running:
            if request.is_decoding:
                shares.append((request, 1))
            elif budget > 0:
                num_tokens = min(request.num_uncomputed_tokens, budget)
                budget -= num_tokens
                shares.append((request, num_tokens))
        return shares

    def _admit(self, entries: list[BatchEntry], budget: int) -> None:
        """Let waiting requests in, oldest first, while places, tokens and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            wants_every_position = request.sampling.prompt_logprobs is not None
            num_cached = self.blocks.open(request, reuse=not wants_every_position)
            # The whole prompt gets its blocks at once, and every running request could take one more: else a
            # newcomer would be preempted in the very next pass, after its prefill was paid for.
            if not self.blocks.reserve(request, request.num_tokens, keep_available=len(self.running)):
                self.blocks.close(request)
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
            num_tokens = min(request.num_uncomputed_tokens, budget)
            budget -= num_tokens
            entries.append(self._entry(request, num_tokens))

    def _entry(self, request: Request, num_tokens: int) -> BatchEntry:
        start = request.num_computed_tokens
        stop = start + num_tokens
        self.blocks.share(request, stop)
        block_ids = self.blocks.block_ids(request, stop)
        return BatchEntry(request, start, num_tokens, block_ids, samples=stop == request.num_tokens)

    def _preempt_youngest(self) -> Request:
        """Send the last admitted request back to the head of the queue; its blocks are free at once."""
        request = self.running.pop()
        self.blocks.close(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        return request


def check_limits(config: SchedulerConfig) -> None:
    """Raises: ConfigError if the limits contradict each other."""
    if config.max_batch_tokens < config.max_running:
        raise ConfigError(
            f"max_batch_tokens ({config.max_batch_tokens}) is below max_running ({config.max_running}): "
            "a pass must hold one token of every running request; raise the first or lower the second"
        )
    capacity = config.num_blocks * config.block_size
    if config.max_model_len > capacity:
        raise ConfigError(
            f"one request may have {config.max_model_len} tokens, but the KV cache holds {capacity}: "
            "enlarge the KV cache or lower max_model_len"
        )
