"""What tests of every scheduler do with it: make requests, do what the engine does in a pass, let traffic run."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeflow.core.batch import Batch
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.request import FinishReason, Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_tree import TokenTree
from moeflow.scheduler.prefix_source import PrefixSource
from moeflow.scheduler.scheduler import Scheduler
from moeflow.scheduler.static_batching import StaticBatching
from tests.scheduler.fake_model import VOCAB_SIZE, FakeModel, generate_alone
from tests.token_trees import token_tree

AnyScheduler = Scheduler | StaticBatching

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)  # few tokens: many shared prefixes


def make_scheduler(prefixes: PrefixSource | None = None, **changes) -> Scheduler:
    values = {
        "block_size": 4,
        "num_blocks": 12,
        "max_model_len": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        **changes,
    }
    return Scheduler(SchedulerConfig(**values), prefixes)


def make_request(name: str, prompt: list[int], max_tokens: int = 5, **sampling) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling), max_tokens)


def batch_request(name: str, prompt: list[int], max_tokens: int = 5) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens, is_batch=True)


def finish_pass(scheduler: AnyScheduler, model: FakeModel, batch: Batch, elapsed_s: float = 0.0) -> None:
    """Compute the scheduled batch, append, finish."""
    brought = model.run(batch)
    scheduler.complete(batch, elapsed_s, {request: len(one.kept) for request, one in brought.items()})
    for request, one in brought.items():
        request.output_token_ids += one.tokens
        if len(request.output_token_ids) == request.max_tokens:
            scheduler.finish(request, FinishReason.LENGTH)
    scheduler.check_integrity()


def drafts(request: Request, rng: random.Random) -> TokenTree:
    """Return a tree of drafts, with none, some or all of one branch right."""
    output = generate_alone(request.prompt_token_ids, request.max_tokens)[len(request.output_token_ids) :]
    sequences = []
    for _ in range(rng.randrange(4)):
        right = output[: rng.randrange(len(output) + 1)]
        sequences.append([*right, *[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]])
    return token_tree(sequences, max_tokens=rng.randrange(20))


def run_pass(
    scheduler: AnyScheduler, model: FakeModel, elapsed_s: float = 0.0, rng: random.Random | None = None
) -> list[Request]:
    """Do what the engine does, with trees of drafts if there are random numbers for them; return who took part."""
    running = [] if rng is None else scheduler.running
    batch = scheduler.schedule({request: drafts(request, rng) for request in running if rng and rng.random() < 0.8})
    assert batch, "a pass must never be empty while there is work"
    assert batch.num_tokens <= scheduler.config.max_num_batched_tokens
    assert not any(e.request in scheduler.waiting for e in batch.entries), "preempted and yet computed"
    assert len({id(e.request) for e in batch.entries}) == len(batch.entries)
    assert (
        sum(e.request in scheduler.running for e in batch.entries) <= scheduler.config.max_num_seqs
    )  # without padding
    finish_pass(scheduler, model, batch, elapsed_s)
    return [entry.request for entry in batch.entries]


def run_to_end(
    scheduler: AnyScheduler,
    model: FakeModel | None = None,
    elapsed_s: float = 0.0,
    rng: random.Random | None = None,
) -> None:
    model = model or FakeModel(scheduler.config.block_size)
    for _ in range(3000):
        if not scheduler.has_work:
            return
        run_pass(scheduler, model, elapsed_s, rng)
    pytest.fail("the scheduler does not come to an end")


class AnyTraffic(RuleBasedStateMachine):
    """Requests come and go at any time, some are cancelled, some passes fail."""

    pass_s = 0.0  # that passes of the end take

    def __init__(self, scheduler: AnyScheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.model = FakeModel(4)
        self.requests: list[Request] = []

    def add(self, make, prompt, max_tokens):
        self.requests.append(make(f"r{len(self.requests)}", prompt, max_tokens))
        self.scheduler.add(self.requests[-1])

    @rule(prompt=prompts, max_tokens=st.integers(1, 15))
    def submit(self, prompt, max_tokens):
        self.add(make_request, prompt, max_tokens)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(rng=st.randoms(use_true_random=False))
    def one_pass(self, rng):
        run_pass(self.scheduler, self.model, rng=rng)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def cancel(self, data):
        alive = [*self.scheduler.waiting, *self.scheduler.running]
        self.scheduler.finish(data.draw(st.sampled_from(alive)), FinishReason.CANCELLED)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(concerns_some=st.booleans())
    def failing_pass(self, concerns_some):
        batch = self.scheduler.schedule()
        self.model.run(batch)
        for entry in batch.entries:  # what a failed pass left in the cache is garbage
            for position in range(entry.start, entry.stop):
                self.model.slots[self.model.slot(entry.block_ids, position)] = (-1, -1)
            if entry.state is not None:
                self.model.states |= dict.fromkeys([entry.state.target, *dict(entry.state.saves).values()])
        if not (concerns_some and self.scheduler.undo(batch)):
            self.scheduler.fail(batch)

    @invariant()
    def nothing_is_lost(self):
        self.scheduler.check_integrity()

    def teardown(self):
        run_to_end(self.scheduler, self.model, self.pass_s)
        for request in self.requests:
            expected = generate_alone(request.prompt_token_ids, request.max_tokens)
            assert request.status is RequestStatus.FINISHED
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
            if request.finish_reason is FinishReason.LENGTH:
                assert request.output_token_ids == expected
        assert self.scheduler.blocks.num_used == 0
