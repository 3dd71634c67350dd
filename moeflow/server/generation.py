"""All sequences of one HTTP request: from its prompts to a single stream of numbered text deltas.

Counts tokens and times on the way, and sees to it that nothing is left running. Knows no OpenAI object.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from moeflow.core.errors import ContextLengthError, EngineError, RequestError
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.encoder_prompt import prompt_of
from moeflow.engine.generator import Generator
from moeflow.engine.merging import merge
from moeflow.server.errors import ApiError
from moeflow.server.guard.admission import Ticket
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service
from moeflow.text.output_text import TextDelta


class Prepared(NamedTuple):
    """What a request comes to once it has been admitted."""

    prompts: list[list[int]]
    sampling: SamplingParams
    shown: frozenset[int] = frozenset()  # special tokens that are text here


async def start_generation(
    service: Service,
    served: ServedModel,
    request_id: str,
    prepare: Callable[[Generator], Awaitable[Prepared]],
    num_sequences: int,
    *,
    is_batch: bool = False,
    pooling: PoolingParams | None = None,
) -> Generation:
    """Admit, prepare and check one request of so many sequences; the work begins when the result is iterated.

    `served` has just been required: nothing was awaited since, and from now on the request's place keeps it loaded.
    One of a batch job takes no place in the queue and no part in the latencies that are reported.

    Waits for tokenizing, in threads of the generator, so that a long prompt delays no other.
    Raises: ApiError, RequestError, ChatTemplateError.
    """
    generator, model = served.loaded, served.info
    ticket = served.admission.admit(num_sequences, max_num_seqs=model.max_num_seqs, is_batch=is_batch)
    try:
        prompts, sampling, shown = await prepare(generator)
        check_lengths(prompts, model.max_model_len)
        streams = [
            generator.stream(
                f"{request_id}-{number}",
                prompt,
                within(sampling, model.max_model_len - len(prompt_of(model, prompt).token_ids)),
                is_batch=is_batch,
                pooling=pooling,
                shown=shown,
            )
            for number, prompt in enumerate(prompts)
        ]
    except BaseException:
        ticket.close()
        raise
    return Generation(served, request_id, streams, prompts, sampling.n, ticket, service)


def check_lengths(prompts: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Refuse prompts that fill the context without space for one token of an answer.

    Raises: ContextLengthError.
    """
    num_prompt = max(map(len, prompts))
    if num_prompt >= max_model_len:
        raise ContextLengthError(num_prompt, max_model_len)


def within(sampling: SamplingParams, room: int) -> SamplingParams:
    """Return parameters with max_tokens bounded by the context."""
    if sampling.max_tokens is None or sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


class Generation:
    """The sequences of one request. Iterate once; closing the iterator ends what still runs.

    The caller must close it: an iterator that was never started cannot release its place.
    """

    def __init__(
        self,
        served: ServedModel,
        request_id: str,
        streams: list[AsyncGenerator[TextDelta, None]],
        prompts: list[list[int]],
        n: int,
        ticket: Ticket,
        service: Service,
    ) -> None:
        self.generator = served.loaded
        self._served = served
        self.request_id = request_id
        self.prompts = prompts
        self.n = n
        self.num_sequences = len(prompts) * n
        self.num_ahead = ticket.num_ahead
        self.is_batch = ticket.is_batch
        self.admitted_s = ticket.admitted_s
        self.num_prompt_tokens = sum(map(len, prompts))
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted_tokens = 0  # drafted tokens that were computed
        self.num_accepted_tokens = 0  # so many were right
        self.queued_s: float | None = None  # in the engine's queue, until the first sequence's first pass
        self.failure: ApiError | None = None  # of a stream that ended early
        self.finish_reasons: list[str] = []  # each once
        self.begun_at_s: float | None = None  # handed to the engine, on the clock of time.monotonic
        self.last_token_at_s: float | None = None
        self.ended_at_s: float | None = None  # the last sequence, on the same clock
        self.slowest_gap_s: float | None = None  # between the tokens of two passes, of one sequence
        self.slowest_gap_at: int | None = None  # completion tokens before it
        self._streams = streams
        self._ticket = ticket
        self._service = service
        self._metrics = service.metrics.generation.of(served.name)
        self._num_finished = 0
        self._first_token_s: dict[int, float] = {}
        self._last_token_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}

    @property
    def model_name(self) -> str:
        """The name of the model that generates."""
        return self.generator.client.model.name

    @property
    def first_token_at_s(self) -> float | None:
        """When the first token came, on the clock of time.monotonic."""
        return min(self._first_token_s.values(), default=None)

    @property
    def prompt_s(self) -> float:
        """Seconds from the first pass to the first token; 0 before it."""
        if self.begun_at_s is None or self.first_token_at_s is None:
            return 0.0
        return max(self.first_token_at_s - self.begun_at_s - (self.queued_s or 0.0), 0.0)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last one so far."""
        if self.last_token_at_s is None or self.first_token_at_s is None:
            return 0.0
        return self.last_token_at_s - self.first_token_at_s

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (choice, delta) as they come; choice = prompt number * n + completion number.

        Raises: ApiError when a sequence fails or is cancelled by the engine; EngineError when the engine goes.
        """
        self.begun_at_s = time.monotonic()
        try:
            async with aclosing(merge(self._streams)) as merged:
                async for prompt_number, delta in merged:
                    choice = prompt_number * self.n + delta.index
                    self._account(choice, delta)
                    yield choice, delta
            if not self._ticket.is_batch:
                self._metrics.request_duration.observe(time.monotonic() - self._ticket.admitted_s)
        except Exception as error:
            self._metrics.failed.inc()
            if isinstance(error, EngineError):
                self._require_engine()  # knows better whether the engine ended or died
            raise
        finally:
            self._account_cut()
            self.ended_at_s = self.ended_at_s or time.monotonic()
            self.close()

    def _require_engine(self) -> None:
        self._service.require_open()
        self._served.require_engine(self.generator)

    def close(self) -> None:
        """Give back the place in the queue; again is harmless."""
        self._ticket.close()

    def _account(self, choice: int, delta: TextDelta) -> None:
        now_s = time.monotonic()
        if choice not in self._num_tokens:
            self._num_tokens[choice] = 0
            self._account_queue(delta.queued_s)
            self.num_cached_tokens += delta.num_cached_tokens if delta.index == 0 else 0
        if delta.token_ids:
            self.last_token_at_s = now_s
            if choice not in self._first_token_s:
                self._first_token_s[choice] = now_s
                if not self._ticket.is_batch:
                    self._metrics.time_to_first_token.observe(now_s - self._ticket.admitted_s)
            else:
                self._account_gap(now_s - self._last_token_s[choice])
            self._last_token_s[choice] = now_s
            self._num_tokens[choice] += len(delta.token_ids)
            self.num_completion_tokens += len(delta.token_ids)
            self.num_drafted_tokens += delta.num_drafted_tokens
            self.num_accepted_tokens += len(delta.token_ids) - 1
        if delta.finish_reason is not None:
            self.ended_at_s = now_s if self._num_finished + 1 == self.num_sequences else None
            self._ticket.finish_one()
            if delta.finish_reason not in self.finish_reasons:
                self.finish_reasons.append(delta.finish_reason)
            self._account_end(choice, delta.finish_reason)
            self._check_end(delta)
            if self._num_tokens[choice] > 1 and not self._ticket.is_batch:
                mean_s = (now_s - self._first_token_s[choice]) / (self._num_tokens[choice] - 1)
                self._metrics.time_per_output_token.observe(mean_s)

    def _account_gap(self, gap_s: float) -> None:
        if self.slowest_gap_s is None or gap_s > self.slowest_gap_s:
            self.slowest_gap_s, self.slowest_gap_at = gap_s, self.num_completion_tokens
        if not self._ticket.is_batch:
            self._metrics.inter_token_latency.observe(gap_s)

    def _account_queue(self, queued_s: float | None) -> None:
        self.queued_s = queued_s if self.queued_s is None else self.queued_s
        if queued_s is not None and not self._ticket.is_batch:
            self._metrics.queue_time.observe(queued_s)

    def _account_cut(self) -> None:
        """Count sequences that end now, before their own end."""
        num_cut = self.num_sequences - self._num_finished
        if num_cut:
            self._service.metrics.generation.finished.labels(self._served.name, FinishReason.CANCELLED).inc(num_cut)

    def _account_end(self, choice: int, reason: FinishReason) -> None:
        self._num_finished += 1
        self._service.metrics.generation.finished.labels(self._served.name, reason).inc()
        self._metrics.prompt_tokens.observe(len(self.prompts[choice // self.n]))
        self._metrics.generation_tokens.observe(self._num_tokens[choice])

    def _check_end(self, delta: TextDelta) -> None:
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._require_engine()  # likewise: it ends the remaining ones when the server shuts down
        if delta.finish_reason is FinishReason.CANCELLED:
            raise ApiError(503, "cancelled", "the request was cancelled in the engine")
        if delta.blames_request:
            raise RequestError(delta.error or "the request cannot be answered")
        raise ApiError(500, "generation_failed", delta.error or "the engine failed on this request")
