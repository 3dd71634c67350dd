"""Static padded batching: the baseline that continuous batching is measured against, as FasterTransformer does it.

Requests wait until a batch is full or the oldest has waited long enough. Prompts are padded on the left to the longest.
The batch then decodes in step until its longest answer is complete. Only then the next one begins. Padding costs as
much as there: a padded position is computed like any other. A finished request keeps its row, which goes through every
layer except attention (FasterTransformer's kernel returns at once for finished rows), and needs no logits. Padding's
keys and values belong to requests of its own, so each request gets the same tokens as alone.

It improves on the original in two points: tokens are returned as they come, not when the batch ends, and rows reserve
only the memory they can use. Batch requests are treated like all others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.request import FinishReason, Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_tree import TokenTree
from moeflow.kv.block_tables import BlockTables
from moeflow.scheduler.scheduler import check_limits

PADDING_TOKEN = 0  # any token will do: it is never visible


class _Row(msgspec.Struct):
    """One line of the padded batch."""

    request: Request
    padding: Request  # computed before the prompt, and in place of a finished request
    num_padding: int  # columns before the prompt

    @property
    def is_over(self) -> bool:
        return self.request.status is RequestStatus.FINISHED


class _PaddedBatch(msgspec.Struct):
    """The rows of the running batch."""

    rows: list[_Row] = []
    width: int = 0  # tokens of the longest prompt
    num_columns: int = 0  # of the prompts, computed so far
    stop: int = 0  # columns computed once the pass under way is complete


class StaticBatching:
    """Owns the queue, the rows and their block tables. The same interface as `Scheduler`."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        check_limits(config)
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # those of the batch that have not ended
        self.num_preemptions = 0
        self.blocks = BlockTables(num_blocks=config.num_blocks, block_size=config.block_size, prefix_caching=False)
        self._clock = clock
        self._waits_since: dict[Request, float] = {}
        self._batch = _PaddedBatch()

    @property
    def has_work(self) -> bool:
        """Whether a pass would compute anything."""
        return bool(self.waiting or self.running)

    @property
    def held_s(self) -> float:
        """Seconds that the next pass is held back, in the hope of more requests."""
        if self.running or not self.waiting or len(self.waiting) >= self.config.max_num_seqs:
            return 0.0
        waited_s = self._clock() - self._waits_since[self.waiting[0]]
        return max(self.config.batch_timeout_s - waited_s, 0.0)

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool on its own: at most `max_model_len` tokens in the end."""
        assert request.status is RequestStatus.WAITING
        assert len(request.prompt_token_ids) + request.max_tokens <= self.config.max_model_len
        assert not request.output_token_ids, "benchmarks run this policy, under no supervisor"
        self.waiting.append(request)
        self._waits_since[request] = self._clock()

    def schedule(self, trees: Mapping[Request, TokenTree] | None = None) -> Batch:
        """Plan the next pass; begins a batch if none runs. Not empty as long as there is work.

        Drafts are left out: the baseline knows none.
        """
        if not self.running and self.waiting:
            self._begin_batch()
        batch = self._batch
        if batch.num_columns == batch.width:
            return Batch(tuple(self._decode_entry(row) for row in batch.rows))
        columns = max(self.config.max_num_batched_tokens // len(batch.rows), 1)
        batch.stop = min(batch.num_columns + columns, batch.width)
        return Batch(tuple(entry for row in batch.rows for entry in self._prefill_entries(row)))

    def complete(self, batch: Batch, elapsed_s: float = 0.0, num_kept: Mapping[Request, int] | None = None) -> None:
        """The pass went well: its tokens are computed."""
        for entry in batch.entries:
            entry.request.num_computed_tokens = entry.stop
        self._batch.num_columns = self._batch.stop

    def fail(self, batch: Batch) -> list[Request]:
        """The pass failed: every request of the batch ends with an error. Returns them."""
        failed = list(self.running)
        for request in failed:
            self.finish(request, FinishReason.ERROR)
        return failed

    def undo(self, batch: Batch) -> bool:
        """Rows of a padded batch share each pass, and fail with it."""
        return False

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request. The last of a batch ends the batch."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.blocks.close(request)
        else:
            self._leave_queue(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if not self.running:
            self._end_batch()

    def check_integrity(self) -> None:
        """Prove the invariants of queue, rows and blocks. AssertionError if one is broken."""
        assert all(r.status is RequestStatus.WAITING and not r.num_computed_tokens for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert set(self._waits_since) == set(self.waiting)
        assert [row.request for row in self._batch.rows if not row.is_over] == self.running
        assert self.running or not self._batch.rows, "a batch of rows that are all over"
        assert len(self._batch.rows) <= self.config.max_num_seqs
        assert self.running or self.blocks.num_used == 0, "blocks leaked: nobody runs, yet some are in use"
        self.blocks.check_integrity()

    def _begin_batch(self) -> None:
        """Take the oldest requests, as many as there are rows and memory for."""
        chosen = self._choose()
        width = max(len(request.prompt_token_ids) for request in chosen)
        self._batch = _PaddedBatch(width=width)
        for request in chosen:
            self._leave_queue(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            padding = Request("padding", [], SamplingParams(), 0, output_token_ids=[PADDING_TOKEN] * width)
            self._batch.rows.append(_Row(request, padding, width - len(request.prompt_token_ids)))
            self.blocks.open(request, reuse=False)
            self.blocks.open(padding, reuse=False)
            self._reserve(request, len(request.prompt_token_ids) + request.max_tokens)

    def _choose(self) -> list[Request]:
        """Return the oldest requests that fit in one padded batch: at least one."""
        chosen: list[Request] = []
        longest_prompt = longest_answer = 0
        for request in list(self.waiting)[: self.config.max_num_seqs]:
            longest_prompt = max(longest_prompt, len(request.prompt_token_ids))
            longest_answer = max(longest_answer, request.max_tokens)
            row_blocks = (
                self.blocks.blocks_for(longest_prompt + longest_answer) + 1
            )  # two tables may end in part blocks
            if chosen and (len(chosen) + 1) * row_blocks > self.config.num_blocks:
                break
            chosen.append(request)
        return chosen

    def _end_batch(self) -> None:
        for row in self._batch.rows:
            self.blocks.close(row.padding)
        self._batch = _PaddedBatch()

    def _prefill_entries(self, row: _Row) -> list[BatchEntry]:
        """Return a row's share of the next columns: padding up to where its prompt begins, then the prompt."""
        start, stop = self._batch.num_columns, self._batch.stop
        prompt_start = self._batch.width if row.is_over else row.num_padding
        entries = []
        num_padding = min(stop, prompt_start) - start
        if num_padding > 0:
            entries.append(self._entry(row.padding, row.padding.num_computed_tokens, num_padding, samples=False))
        first = max(start, prompt_start)
        if first < stop:
            samples = stop == self._batch.width and row.request.pooling is None
            entries.append(self._entry(row.request, first - prompt_start, stop - first, samples=samples))
        return entries

    def _decode_entry(self, row: _Row) -> BatchEntry:
        """Return a row's token of the next pass; where the request is over, one that sees only itself."""
        if row.is_over:
            return self._entry(row.padding, 0, 1, samples=False)
        return self._entry(row.request, row.request.num_computed_tokens, 1, samples=True)

    def _entry(self, request: Request, start: int, num_tokens: int, *, samples: bool) -> BatchEntry:
        stop = start + num_tokens
        self._reserve(request, stop)
        return BatchEntry(request, start, num_tokens, self.blocks.block_ids(request, stop), samples)

    def _reserve(self, request: Request, num_tokens: int) -> None:
        has_room = self.blocks.reserve(request, num_tokens)
        assert has_room, "a batch is only begun if memory holds it to the end"

    def _leave_queue(self, request: Request) -> None:
        self.waiting.remove(request)
        del self._waits_since[request]
