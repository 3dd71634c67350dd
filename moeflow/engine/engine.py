"""The step loop: plan a pass, run it, return its outputs. Token ids only.

One object owns all running state. The caller drives it, one `step` at a time: the offline API in the caller's thread,
or the engine process. So nothing here waits, sleeps or locks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import (
    DraftedTree,
    EngineStats,
    ModelInfo,
    PromptProgress,
    Submission,
    TokenLogprobs,
    TokenOutput,
)
from moeflow.core.errors import ConfigError, GroupError, MoeflowError, RequestError, StorageError
from moeflow.core.request import FinishReason, Request, RequestStatus
from moeflow.core.token_tree import TokenTree
from moeflow.engine.constraints.constraints import Constraints
from moeflow.engine.counters import Counters
from moeflow.engine.encoder_prompt import check_input, prompt_of
from moeflow.engine.model_runner import PassResult, Runner
from moeflow.engine.pooling import NOT_FINITE, Pooler
from moeflow.engine.pooling_choice import check_generates, check_pooling
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.sampler import SampledToken
from moeflow.engine.verification import Verified
from moeflow.kernels.on_demand import on_demand
from moeflow.scheduler.policy import SchedulingPolicy, make_scheduler
from moeflow.speculation.counts import SpeculationCounts

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight
    from moeflow.engine.constraints.compiled_grammar import CompiledGrammar
    from moeflow.engine.observing.observer import Observer
    from moeflow.engine.prompt_cache.prompt_cache import PromptCache
    from moeflow.speculation.speculation import Speculation

with on_demand(__name__):
    from moeflow.engine.observing import observer
    from moeflow.engine.prompt_cache import opening
    from moeflow.engine.speculators import loading

logger = logging.getLogger(__name__)

_FORM_WAIT_S = 0.002  # for the form of an answer to be understood, where there is nothing else to do
_MASK_WAIT_S = 0.01  # for the tokens that forms allow, likewise
_PREFIX_WAIT_S = 0.01  # for prefixes to be read, likewise


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
        on_pass: Callable[[Batch], None] | None = None,
        speculation: Speculation | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self.config = config
        self.model: ModelInfo = runner.info
        if self.model.encoder is not None and config.scheduler.policy != "continuous":
            raise ConfigError(f"encoder-decoders are not run with the scheduling policy {config.scheduler.policy!r}")
        if config.scheduler.states is not None and config.scheduler.policy != "continuous":
            raise ConfigError(
                f"models with recurrent layers are not run with the scheduling policy {config.scheduler.policy!r}"
            )
        self._runner = runner
        self._scheduler: SchedulingPolicy = make_scheduler(config.scheduler, prompt_cache)
        self._requests: dict[str, Request] = {}
        self._prompt_logprobs: dict[Request, list[TokenLogprobs | None]] = {}
        self._pooler = Pooler(runner.classify)
        self._cancelled: list[TokenOutput] = []  # to be returned by the next step
        self._constraints = Constraints(config.model_path, self.model.eos_token_ids)
        self._waiting_for_form: dict[Request, Future[CompiledGrammar]] = {}  # before the scheduler gets them
        self._counters = Counters()
        self._clock = clock
        self._on_pass = on_pass
        self._speculation = speculation
        self._prompt_cache = prompt_cache
        self._observer: Observer | None = None  # while somebody looks

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        on_pass: Callable[[Batch], None] | None = None,
    ) -> Engine:
        """Load the model and set up the KV cache. `progress` is called with bytes done and bytes in all.

        `on_pass` is called with each batch before it is computed.

        Raises: CheckpointError, CapacityError.
        """
        runner = load_runner(config, progress)
        with ExitStack() as on_failure:
            on_failure.callback(runner.close)
            prompt_cache = None if config.prompt_cache is None else opening.open_prompt_cache(config, runner)
            if prompt_cache is not None:
                on_failure.callback(prompt_cache.close)
            engine = cls.over(config, runner, on_pass=on_pass, prompt_cache=prompt_cache)
            on_failure.pop_all()
            return engine

    @classmethod
    def over(
        cls,
        config: EngineConfig,
        runner: Runner,
        on_pass: Callable[[Batch], None] | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> Engine:
        """Return an engine over a model that is loaded, with the speculators that `config` names.

        Raises: CheckpointError or CapacityError if one of these cannot be loaded.
        """
        if not config.speculators:
            return cls(config, runner, on_pass=on_pass, prompt_cache=prompt_cache)
        speculation = loading.speculation_of(loading.load_speculators(config, runner), runner)
        return cls(config, runner, on_pass=on_pass, speculation=speculation, prompt_cache=prompt_cache)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would bring anything."""
        return self._scheduler.has_work or bool(self._cancelled or self._waiting_for_form)

    @property
    def held_s(self) -> float:
        """Seconds for which a `step` would compute nothing, because the scheduler hopes for more requests."""
        return 0.0 if self._cancelled else self._scheduler.held_s

    def submit(self, submission: Submission) -> None:
        """Queue one sequence. Raises: RequestError if it could never run, or if its id is in use."""
        self._check(submission)
        sampling = submission.sampling
        prompt = prompt_of(self.model, submission.prompt_token_ids, is_pooled=submission.pooling is not None)
        room = self.config.scheduler.max_model_len - len(prompt.token_ids)
        eos = self.model.eos_token_ids if sampling.ends_by_eos else ()
        request = Request(
            submission.request_id,
            list(prompt.token_ids),
            sampling,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            stop_token_ids=frozenset(eos).union(sampling.stop_token_ids),
            seed=submission.seed,
            is_batch=submission.is_batch,
            submitted_s=self._clock(),
            isolated_until=submission.isolated_until,
            output_token_ids=list(submission.generated_token_ids),
            num_encoder_tokens=prompt.num_encoder_tokens,
            num_together=prompt.num_together,
            pooling=submission.pooling,
        )
        assert len(request.output_token_ids) < max(request.max_tokens, 1), "it had ended in the engine it comes from"
        self._requests[request.request_id] = request
        if sampling.grammar:
            self._waiting_for_form[request] = self._constraints.compiled(sampling.grammar)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        self._scheduler.add(request)
        self._runner.expect(request)

    def _queue_formed(self) -> list[TokenOutput]:
        """Queue requests with a compiled form of answers; return the ends of requests with an invalid one."""
        refused: list[TokenOutput] = []
        if self._waiting_for_form and not self._scheduler.has_work:
            wait(self._waiting_for_form.values(), _FORM_WAIT_S, FIRST_COMPLETED)
        for request, making in [*self._waiting_for_form.items()]:
            if not making.done():
                continue
            del self._waiting_for_form[request]
            try:
                request.constraint = making.result().constraint()
            except Exception as error:
                if not isinstance(error, MoeflowError):
                    logger.error("a form of answers could not be prepared", exc_info=error)
                self._forget(request)
                refused.append(
                    TokenOutput(
                        request_id=request.request_id,
                        finish_reason=FinishReason.ERROR,
                        error=str(error),
                        blames_request=isinstance(error, RequestError),
                    )
                )
            else:
                self._queue(request)
        return refused

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests now: place and blocks are free for the next pass. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                if self._waiting_for_form.pop(request, None) is None:
                    self._scheduler.finish(request, FinishReason.CANCELLED)
                self._forget(request)
                self._counters.cancelled += 1
                self._cancelled.append(TokenOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))

    def load_ahead(self) -> None:
        """Load what a first answer with a form needs, so that it holds up no pass later. For a time without work.

        Within a limit of memory it waits for that answer, which may never come.
        """
        if not self.config.memory_bytes:
            self._constraints.load_ahead()

    def cancel_all(self) -> None:
        """End every request, waiting or running."""
        self.cancel(list(self._requests))

    def step(self) -> list[TokenOutput]:
        """Run one pass and return its outputs; [] if only ranks needed upkeep.

        A pass that fails (out of memory, say) ends its own requests with an error; the engine lives on. Where something
        could not be read, only those end that need it: the scheduler has each computed apart.

        Raises: GroupError if a rank is gone that has a part of the model.
        """
        if self._observer is not None and self._observer.is_over:
            self._end_observing()
        outputs, self._cancelled = self._cancelled, []
        outputs += self._queue_formed()
        outputs += self._take_late(0.0)
        if self._scheduler.has_work and not self._scheduler.held_s:
            if self._prompt_cache is not None:
                self._prompt_cache.await_looks()
            if batch := self._scheduler.schedule(self._trees()):
                outputs += self._run(batch)
            else:
                late = self._take_late(_MASK_WAIT_S)
                if not late and self._prompt_cache is not None:
                    self._prompt_cache.await_any(_PREFIX_WAIT_S)
                outputs += late
        elif not outputs:  # pending outputs must not be lost with the engine
            self._runner.check_ranks()
        self._runner.settle(self._scheduler.blocks)
        return outputs

    def _run(self, batch: Batch) -> list[TokenOutput]:
        """Run a pass; return its outputs, or the ends of its requests if it fails."""
        if self._on_pass is not None:
            self._on_pass(batch)
        started_s = self._clock()
        _note_begin(batch, started_s)
        if self._observer is not None:
            self._tell(self._observer.begin_pass)
        try:
            result = self._runner.run(batch)
        except GroupError:  # a rank is gone, and with it a part of the model: nothing can be computed any more
            raise
        except Exception as error:  # whatever else a kernel may raise concerns this pass alone
            if self._observer is not None:
                self._tell(self._observer.drop_pass)
            return self._fail(batch, error)
        elapsed_s = self._clock() - started_s
        if self._observer is not None:
            self._tell(self._observer.end_pass, batch, result.sampled, started_s, elapsed_s)
        outputs = self._complete(batch, result, elapsed_s)
        if self._observer is not None and not self._scheduler.has_work:
            self._tell(self._observer.rest)
        return outputs

    def look(self, question: Question) -> Sight:
        """Answer a question about the passes, and observe them for a time. Not during a `step`."""
        if self._observer is None:
            self._observer = observer.Observer(self._runner.observed())
        return self._observer.answer(question)

    def _tell(self, note: Callable[..., None], *facts: object) -> None:
        """Tell the observer something. An error in it ends the observation, and no request."""
        try:
            note(*facts)
        except GroupError:
            raise
        except Exception:
            logger.exception("passes are not observed until the next question about them")
            self._end_observing()

    def _end_observing(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def stats(self) -> EngineStats:
        """Return a snapshot of queue, cache and counters."""
        counts, trials = SpeculationCounts(), []
        if self._speculation is not None:
            counts, trials = self._speculation.counts, self._speculation.trials
        found = self._counters.snapshot(self._scheduler, self._runner.expert_stats(), counts, trials)
        if self._prompt_cache is None:
            return found
        return msgspec.structs.replace(found, **self._prompt_cache.stats())

    def close(self) -> None:
        """Close the model's threads and files, all of them even if one cannot be; nothing can be computed any more.

        Raises: whatever that one raised.
        """
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self._runner.close)
            closing.callback(self._constraints.close)
            if self._prompt_cache is not None:
                closing.callback(self._prompt_cache.close)
            closing.callback(self._end_observing)

    def check_integrity(self) -> None:
        """Prove that queue, blocks and requests agree. AssertionError if not."""
        self._scheduler.check_integrity()
        known = {id(request) for request in self._requests.values()}
        queued = {id(request) for request in (*self._scheduler.waiting, *self._scheduler.running)}
        queued |= set(map(id, self._waiting_for_form))
        assert known == queued
        assert all(id(request) in known for request in (*self._prompt_logprobs, *self._pooler.requests))
        assert all(request.status is not RequestStatus.FINISHED for request in self._requests.values())

    def _check(self, submission: Submission) -> None:
        """Refuse what could never run, or would fail the pass of others."""
        sampling = submission.sampling
        check_input(self.model, submission.prompt_token_ids, sampling)
        num_prompt = len(prompt_of(self.model, submission.prompt_token_ids).token_ids)
        limit = self.config.scheduler.max_model_len
        if submission.request_id in self._requests:
            raise RequestError(f"request id {submission.request_id!r} is in use")
        if not submission.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if num_prompt + (sampling.max_tokens or 0) > limit:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {sampling.max_tokens or 0} exceed "
                f"the {limit} tokens that one request may have",
                param="prompt",
            )
        if submission.pooling is None:
            check_generates(self.model)
        else:
            check_pooling(self.model, submission.pooling)
        for param, token_ids in (
            ("prompt", submission.prompt_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if not all(0 <= token_id < self.model.vocab_size for token_id in token_ids):
                raise RequestError(f"{param} names a token id outside 0..{self.model.vocab_size - 1}", param=param)

    def _trees(self) -> Mapping[Request, TokenTree]:
        """Return drafts for running requests, if they fit and no request waits for its prompt."""
        if self._speculation is None or self._scheduler.waiting:
            return {}
        computed = [request for request in self._scheduler.running if request.num_uncomputed_tokens]
        return self._speculation.trees(computed, self.config.scheduler.max_num_batched_tokens)

    def _complete(self, batch: Batch, result: PassResult, elapsed_s: float) -> list[TokenOutput]:
        kept = {request: one.kept for request, one in result.sampled.items()}
        self._scheduler.complete(batch, elapsed_s, {request: len(nodes) for request, nodes in kept.items()})
        if self._speculation is not None:
            self._speculation.note(batch, kept, elapsed_s)
        if self._prompt_cache is not None:
            self._prompt_cache.note_pass(batch, self._scheduler.blocks)
        outputs = []
        for entry in batch.entries:
            self._collect_prompt_logprobs(entry, result)
            if entry.request.sampling.prompt_progress and not entry.request.output_token_ids:
                outputs.append(self._report_progress(entry.request))
            if entry.request in result.sampled:
                outputs.append(self._advance(entry, result.sampled[entry.request]))
            if entry.pooled:
                self._pooler.add(entry, result.pooled[entry.request])
            if entry.ends_pooling:
                outputs.append(self._finish_pooling(entry.request))
        self._counters.count_pass(batch, num_generated=sum(len(output.token_ids) for output in outputs))
        return outputs

    def _take_late(self, wait_s: float) -> list[TokenOutput]:
        """Return what earlier passes bring only now, for requests that have been computed and wait for it."""
        outputs = [
            self._advance(entry, verified)
            for entry, verified in self._runner.take_late(wait_s)
            if entry.request.request_id in self._requests and not entry.request.num_uncomputed_tokens
        ]
        self._counters.count_late(sum(len(output.token_ids) for output in outputs))
        return outputs

    def _advance(self, entry: BatchEntry, verified: Verified) -> TokenOutput:
        """Append a request's new tokens, as many as there are until one ends it."""
        request = entry.request
        is_first = not request.output_token_ids
        new: list[SampledToken] = []
        reason, error, blames_request = None, None, False
        for sampled in verified.tokens:
            error, blames_request = sampled.error, sampled.blames_request
            reason = _ending(request, sampled)
            if error is None and request.max_tokens:
                new.append(sampled)
                request.output_token_ids.append(sampled.token_id)
            if reason is not None:
                break
        if is_first:
            self._counters.prefix_hits += request.num_cached_tokens
        tree = self._drafted_tree(entry, verified.kept[: len(new)])
        if tree is not None and self._observer is not None:
            self._tell(self._observer.note_drafts, request, len(request.output_token_ids) - len(new), tree)
        stopped_by_user = reason is FinishReason.STOP and new[-1].token_id not in self.model.eos_token_ids
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=[sampled.token_id for sampled in new],
            logprobs=[sampled.logprobs for sampled in new if sampled.logprobs is not None] or None,
            prompt_logprobs=self._prompt_logprobs.pop(request, None) if is_first else None,
            finish_reason=reason,
            stop_token_id=new[-1].token_id if stopped_by_user else None,
            num_cached_tokens=request.num_cached_tokens,
            num_drafted_tokens=len(entry.tree),
            drafted_tree=tree if request.sampling.token_trees else None,
            queued_s=request.queued_s if is_first else None,
            error=error,
            blames_request=blames_request,
        )
        if reason is not None:
            self._finish(request, reason)
        return output

    def _report_progress(self, request: Request) -> TokenOutput:
        """Return how far a prompt is computed after a pass; after a preemption no less than at the start."""
        assert request.queued_s is not None, "it has just had a pass"
        progress = PromptProgress(
            num_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=max(request.num_computed_tokens, request.num_cached_tokens),
            elapsed_s=self._clock() - request.submitted_s - request.queued_s,
        )
        return TokenOutput(
            request_id=request.request_id,
            num_cached_tokens=request.num_cached_tokens,
            queued_s=request.queued_s,
            prompt_progress=progress,
        )

    def _finish_pooling(self, request: Request) -> TokenOutput:
        """End a request whose prompt is computed: with its vector, or with an error."""
        self._counters.prefix_hits += request.num_cached_tokens
        embedding = self._pooler.take(request)
        reason = FinishReason.ERROR if embedding is None else FinishReason.STOP
        self._finish(request, reason)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            queued_s=request.queued_s,
            embedding=embedding,
            error=NOT_FINITE if embedding is None else None,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self._prompt_cache is not None:
            self._prompt_cache.note_end(request, self._scheduler.blocks)
        self._scheduler.finish(request, reason)
        self._forget(request)
        self._counters.finished += 1

    def _drafted_tree(self, entry: BatchEntry, accepted: list[int]) -> DraftedTree | None:
        """Return an entry's drafts if its request reports them, or somebody looks.

        `accepted` are nodes that have become tokens.
        """
        if self._speculation is None or not entry.tree:
            return None
        if not entry.request.sampling.token_trees and self._observer is None:
            return None
        nodes = self._speculation.nodes(entry)
        return DraftedTree(
            token_ids=[node.token_id for node in nodes],
            parents=list(entry.tree.parents),
            speculators=[sorted({name for name, _ in node.origins}) for node in nodes],
            chances=[round(node.chance, 4) for node in nodes],
            accepted=accepted,
        )

    def _collect_prompt_logprobs(self, entry: BatchEntry, result: PassResult) -> None:
        request = entry.request
        if request in result.prompt_logprobs and not request.output_token_ids:
            if entry.start == 0:  # also when it starts over after a preemption
                self._prompt_logprobs[request] = [None]
            self._prompt_logprobs[request] += result.prompt_logprobs[request]

    def _fail(self, batch: Batch, error: Exception) -> list[TokenOutput]:
        is_foreseen = isinstance(error, MoeflowError)
        logger.error("a pass of %d tokens failed: %s", batch.num_tokens, error, exc_info=None if is_foreseen else error)
        self._counters.failed_passes += 1
        if isinstance(error, StorageError) and self._scheduler.undo(batch):
            return []
        failed = self._scheduler.fail(batch)
        reason = f"the pass failed: {_for_clients(error)}".splitlines()[0]
        for request in failed:
            self._forget(request)
        return [
            TokenOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=reason)
            for request in failed
        ]

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._prompt_logprobs.pop(request, None)
        self._pooler.forget(request)
        if self._speculation is not None:
            self._speculation.forget(request)


def _note_begin(batch: Batch, now_s: float) -> None:
    """Note how long the requests that take part in a pass for the first time have waited for it."""
    for entry in batch.entries:
        if entry.request.queued_s is None:
            entry.request.queued_s = now_s - entry.request.submitted_s


def _ending(request: Request, sampled: SampledToken) -> FinishReason | None:
    """Return why a request ends with its next token; None: it continues."""
    if sampled.error is not None:
        return FinishReason.ERROR
    if request.max_tokens and sampled.token_id in request.stop_token_ids:
        return FinishReason.STOP
    is_last = len(request.output_token_ids) + 1 >= request.max_tokens
    return FinishReason.LENGTH if is_last else None


def _for_clients(error: Exception) -> str:
    text = error.for_clients if isinstance(error, StorageError) else str(error)
    return f"{type(error).__name__}: {text}"
