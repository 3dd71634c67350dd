"""Requests outlive the engines that compute them: no token is lost, doubled or another, and who kills fails alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.batch import Batch
from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.processes.continuation import Continuation, judge
from moeflow.processes.deaths import Death
from moeflow.processes.replica_target import ReplicaTarget
from moeflow.processes.restart_limits import MAX_FRUITLESS, RestartLimits
from moeflow.processes.supervisor import Supervisor
from tests.engine.fake_runner import scheduler_config
from tests.patience import PATIENCE_S
from tests.processes.mortal_engine import OUTSIDE, Loss, World
from tests.scheduler.fake_model import generate_alone


def submission(name: str, prompt: list[int], num_tokens: int = 6, **changes) -> Submission:
    sampling = SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, **changes.pop("sampling", {})})
    return Submission(name, prompt, sampling, seed=1, **changes)


async def supervise(
    world: World, limits: Callable[[], RestartLimits] = lambda: RestartLimits(10_000), num_replicas: int = 1, **options
) -> Supervisor:
    scheduler = scheduler_config(**world.engine_options)
    supervisor = Supervisor([world.start] * num_replicas, limits, scheduler=scheduler, **options)
    await supervisor.load()
    return supervisor


async def read(supervisor: Supervisor, submission: Submission, turns: int = 0) -> list[TokenOutput]:
    """Read a stream that begins after so many turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return [output async for output in supervisor.stream(submission)]


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check_whole(submission: Submission, outputs: list[TokenOutput]) -> None:
    """The outputs are those of an engine that lived on."""
    assert tokens(outputs) == generate_alone(submission.prompt_token_ids, submission.sampling.max_tokens)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert len({output.num_cached_tokens for output in outputs}) == 1
    prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    if submission.sampling.prompt_logprobs is None:
        assert not prompt_logprobs
    else:
        assert outputs[0].prompt_logprobs == prompt_logprobs[0]
        assert [each and each.token_id for each in prompt_logprobs[0]] == [None, *submission.prompt_token_ids[1:]]
        assert len(prompt_logprobs) == 1


def run(body: Callable[[], object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await body()

    asyncio.run(bounded())


PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=20)
REQUESTS = st.tuples(PROMPTS, st.integers(1, 8), st.booleans(), st.sampled_from([None, 0]), st.integers(0, 60))


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=7),
    kills=st.dictionaries(st.integers(0, 60), st.sampled_from(Loss), max_size=12),
    start_turns=st.integers(0, 20),
)
@settings(max_examples=60)
def test_killed_in_any_passes_streams_are_those_of_an_engine_that_lives(requests, kills, start_turns):
    """Also where requests arrive between two engines, blocks run out, and tokens are lost on their way."""
    submissions = [
        submission(f"r{index}", prompt, num, is_batch=batch, sampling={"prompt_logprobs": logprobs})
        for index, (prompt, num, batch, logprobs, _) in enumerate(requests)
    ]

    async def body() -> None:
        world = World(kills, start_turns=start_turns, num_blocks=12)
        supervisor = await supervise(world)
        arrivals = [turns for *_, turns in requests]
        streams = (read(supervisor, *each) for each in zip(submissions, arrivals, strict=True))
        for each, outputs in zip(submissions, await asyncio.gather(*streams), strict=True):
            check_whole(each, outputs)
        assert supervisor.stats().engine_restarts_total == world.num_deaths
        assert supervisor.stats().num_running == 0
        await supervisor.shutdown(1)

    run(body)


def has(name: str, num_tokens: int) -> Callable[[Batch], bool]:
    """An engine crashes when it computes this request with so many output tokens."""

    def is_deadly(batch: Batch) -> bool:
        requests = (entry.request for entry in batch.entries)
        return any(r.request_id == name and len(r.output_token_ids) >= num_tokens for r in requests)

    return is_deadly


@pytest.mark.parametrize("loss", [Loss.IN_PASS, Loss.LATE])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_a_request_that_kills_twice_fails_alone(num_tokens, loss):
    async def body() -> None:
        world = World(is_deadly=has("deadly", num_tokens), loss=loss, num_blocks=40, max_num_batched_tokens=40)
        supervisor = await supervise(world)
        good = [submission(f"good-{number}", [number, 1], 12) for number in range(5)]
        bad = submission("deadly", [9], 12)
        outputs, *others = await asyncio.gather(*(read(supervisor, each) for each in (bad, *good)))
        for each, answer in zip(good, others, strict=True):
            check_whole(each, answer)
        num_lost = min(num_tokens, 1) if loss is Loss.LATE else 0
        assert tokens(outputs) == generate_alone([9], 12)[: num_tokens - num_lost]
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "died of this request, and again when it was computed alone (SIGSEGV)" in outputs[-1].error
        assert world.num_deaths == 2
        assert supervisor.stats().num_running == 0
        await supervisor.shutdown(1)

    run(body)


def test_several_deadly_requests_fail_each_for_itself():
    async def body() -> None:
        deadly = [has("deadly-0", 0), has("deadly-1", 1), has("deadly-2", 1)]
        world = World(is_deadly=lambda batch: any(each(batch) for each in deadly), num_blocks=40, max_num_seqs=8)
        supervisor = await supervise(world)
        good = [submission(f"good-{number}", [number, 1], 9) for number in range(3)]
        bad = [submission(f"deadly-{number}", [number, 2], 9) for number in range(3)]
        answers = await asyncio.gather(*(read(supervisor, each) for each in (*good, *bad)))
        for each, answer in zip(good, answers, strict=False):
            check_whole(each, answer)
        assert all(answer[-1].finish_reason is FinishReason.ERROR for answer in answers[len(good) :])
        assert world.num_deaths <= 6
        await supervisor.shutdown(1)

    run(body)


def test_those_in_the_pass_of_a_crash_are_computed_alone_up_to_where_it_happened():
    async def body() -> None:
        first = True

        def is_deadly(batch: Batch) -> bool:
            nonlocal first
            is_now = first and len(batch.entries) == 3 and all(e.request.output_token_ids for e in batch.entries)
            first = first and not is_now
            return is_now

        world = World(is_deadly=is_deadly, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=40)
        supervisor = await supervise(world)
        submissions = [submission(f"r{number}", [number], 8) for number in range(4)]
        answers = await asyncio.gather(*(read(supervisor, each) for each in submissions))
        for each, answer in zip(submissions, answers, strict=True):
            check_whole(each, answer)
        crash = next(number for number, batch in enumerate(world.batches) if len(batch) == 3 and all(batch.values()))
        assert [list(batch) for batch in world.batches[crash + 1 : crash + 4]] == [["r0"], ["r1"], ["r2"]]
        assert len(world.batches[crash + 4]) == 3
        await supervisor.shutdown(1)

    run(body)


def test_who_comes_further_between_crashes_is_not_to_blame():
    """Say, a processor that computes wrongly now and then: each crash is at another token."""

    async def body() -> None:
        crashes = {1, 2, 4, 7}

        def is_deadly(batch: Batch) -> bool:
            here = {len(entry.request.output_token_ids) for entry in batch.entries} & crashes
            crashes.difference_update(here)
            return bool(here)

        world = World(is_deadly=is_deadly)
        supervisor = await supervise(world)
        alone = submission("alone", [1, 2], 10)
        check_whole(alone, await read(supervisor, alone))
        assert world.num_deaths == 4
        await supervisor.shutdown(1)

    run(body)


def test_nobody_is_guilty_in_company():
    requests = {name: Continuation(submission(name, [1])) for name in ("a", "b")}
    for _ in range(20):
        assert judge(Death("SIGSEGV", in_pass={"a": 0, "b": 0}), requests) is None
    assert judge(Death("SIGSEGV"), requests) is None
    assert judge(Death("SIGSEGV", in_pass={"b": 0}), requests) is requests["b"]


def test_who_goes_on_first():
    """Interactive answers that have begun come first; of these, the longest wait for a token."""
    names = ("first", "batch", "not begun", "second", "third")
    requests = {name: Continuation(submission(name, [1], is_batch=name == "batch")) for name in names}
    for name in ("third", "first", "second", "batch", "third"):
        requests[name].receive(TokenOutput(request_id=name, token_ids=[4]))
        time.sleep(0.001)
    order = sorted(requests, key=lambda name: requests[name].place)
    assert order == ["first", "second", "third", "not begun", "batch"]


def test_who_is_killed_from_outside_is_under_no_suspicion():
    async def body() -> None:
        world = World({0: Loss.IN_PASS, 1: Loss.IN_PASS, 2: Loss.IN_PASS})
        supervisor = await supervise(world)
        alone = submission("alone", [1, 2])
        check_whole(alone, await read(supervisor, alone))
        assert world.num_deaths == 3
        await supervisor.shutdown(1)

    run(body)


def test_who_makes_somebody_else_kill_the_engine_is_found_too():
    """A watcher of the machine's memory sends SIGKILL, and the kernel counts nothing."""

    async def body() -> None:
        world = World(is_deadly=has("greedy", 2), crash=OUTSIDE)
        supervisor = await supervise(world)
        good, bad = submission("good", [1, 2], 10), submission("greedy", [3], 10)
        answer, outputs = await asyncio.gather(read(supervisor, good), read(supervisor, bad))
        check_whole(good, answer)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert world.num_deaths < 10
        await supervisor.shutdown(1)

    run(body)


def test_an_engine_that_cannot_work_is_given_up_and_everybody_told():
    async def body() -> None:
        failures: list[int] = []
        world = World({0: Loss.IN_PASS})
        supervisor = await supervise(world, FastLimits, on_failure=lambda: failures.append(1))
        world.fail_starts = 10**6
        stream = asyncio.create_task(read(supervisor, submission("r", [1])))
        with pytest.raises(EngineError, match=r"died for good \(not enough memory\).*in a row"):
            await stream
        assert failures == [1]
        assert supervisor.state is EngineState.GONE
        assert 10**6 - world.fail_starts == MAX_FRUITLESS + 1  # the first start is not after a crash
        with pytest.raises(EngineError, match="died for good"):
            await read(supervisor, submission("late", [1]))
        await supervisor.shutdown(1)

    run(body)


class FastLimits(RestartLimits):
    delay_s = 0.0


def test_an_unforeseen_error_of_a_start_is_no_hang():
    async def body() -> None:
        world = World({0: Loss.IN_PASS})
        supervisor = await supervise(world, FastLimits)

        async def start(**callbacks: object) -> None:
            raise OSError("too many open files")

        supervisor._replicas[0]._start = start
        with pytest.raises(EngineError, match="too many open files"):
            await read(supervisor, submission("r", [1]))
        await supervisor.shutdown(1)

    run(body)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def test_the_end_of_a_stream_does_not_concern_another_of_the_same_id():
    async def body() -> None:
        supervisor = await supervise(World())
        asked = submission("same", [1], 9)
        async with aclosing(supervisor.stream(asked)) as stream:
            while (await anext(stream)).finish_reason is None:
                pass
            again = asyncio.create_task(read(supervisor, asked))
            await until(lambda: supervisor.stats().num_running == 1)
        check_whole(asked, await again)
        await supervisor.shutdown(1)

    run(body)


def test_between_two_engines_it_says_so_and_requests_may_leave():
    async def body() -> None:
        world = World({3: Loss.IN_PASS}, start_turns=50)
        supervisor = await supervise(world)
        async with aclosing(supervisor.stream(submission("closing", [1]))) as stream:
            await anext(stream)
            await until(lambda: supervisor.state is EngineState.RESTARTING)
            assert supervisor.stats().num_waiting == 1
        await until(lambda: supervisor.state is EngineState.READY)
        assert [each.request_id for _, each in world.submitted] == ["closing"]  # not again
        assert supervisor.stats().num_waiting == supervisor.stats().num_running == 0
        assert not world.engine._engine.has_work
        await supervisor.shutdown(1)
        assert supervisor.state is EngineState.GONE

    run(body)


def test_an_engine_of_whose_death_we_have_not_heard_yet_is_on_its_way_back():
    """A process may be gone while its last messages are still read: at no moment has the server failed."""

    async def body() -> None:
        world = World()
        supervisor = await supervise(world)
        world.engine.state = EngineState.GONE
        assert supervisor.state is EngineState.RESTARTING
        assert supervisor.back_in_s >= 0
        await supervisor.shutdown(0)
        assert supervisor.state is EngineState.GONE

    run(body)


def test_waits_for_first_tokens_count_towards_the_target():
    clock = itertools.count(0, 2)
    target = ReplicaTarget(1, 2, 1.0, lambda: next(clock))

    async def body() -> None:
        supervisor = await supervise(World(), target=target)
        assert target.first_tokens.need(1, 1) == 1
        await asyncio.gather(*(read(supervisor, submission(f"r{number}", [number, 3])) for number in range(10)))
        assert target.first_tokens.need(1, 1) == 2
        assert [target.first_tokens.need(1, 1) for _ in range(20)][-1] == 1
        await supervisor.shutdown(5)

    run(body)


def test_leaving_early_cancels_the_request_in_the_engine():
    async def body() -> None:
        world = World()
        supervisor = await supervise(world)
        async with aclosing(supervisor.stream(submission("r", [1], 40))) as stream:
            await anext(stream)
        await until(lambda: supervisor.stats().requests_cancelled_total == 1)
        await until(lambda: not world.engine._engine.has_work)
        await supervisor.shutdown(1)

    run(body)


def test_totals_go_on_growing():
    async def body() -> None:
        world = World({5: Loss.IN_PASS})
        supervisor = await supervise(world)
        await read(supervisor, submission("before", [1], 4))
        seen = supervisor.stats()
        assert (seen.generated_tokens_total, seen.requests_finished_total) == (4, 1)
        await read(supervisor, submission("through", [2], 4))
        stats = supervisor.stats()
        assert world.num_deaths == 1
        assert stats.generated_tokens_total == 8
        assert stats.requests_finished_total == 2
        assert stats.passes_total > seen.passes_total
        assert stats.engine_restarts_total == 1
        await supervisor.shutdown(1)

    run(body)


def test_a_shutdown_waits_for_an_engine_that_is_on_its_way():
    async def body() -> None:
        world = World({2: Loss.IN_PASS}, start_turns=30)
        supervisor = await supervise(world)
        each = submission("r", [1], 8)
        reading = asyncio.create_task(read(supervisor, each))
        await until(lambda: supervisor.state is EngineState.RESTARTING)
        await supervisor.shutdown(30)
        check_whole(each, await reading)

    run(body)


def test_a_shutdown_without_time_ends_streams_that_wait_for_an_engine():
    async def body() -> None:
        world = World({2: Loss.IN_PASS})
        supervisor = await supervise(world)
        world.start_turns = 10**9
        reading = asyncio.create_task(read(supervisor, submission("r", [1], 8)))
        await until(lambda: supervisor.state is EngineState.RESTARTING)
        await supervisor.shutdown(0)
        with pytest.raises(EngineError, match="shut down"):
            await reading

    run(body)


def test_a_death_says_who_was_in_the_pass_and_nobody_else_is_suspected():
    """The engine dies between passes: no request is to blame, and the bound ends it."""

    async def body() -> None:
        world = World(is_deadly=has("r", 1), crash=Death("exit code 1"))
        supervisor = await supervise(world, FastLimits)
        engine_death = world.engine._die
        world.engine._die = lambda death, in_pass: engine_death(death, {})
        outputs = await read(supervisor, submission("r", [1], 4))
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert world.num_deaths == 3  # the first of them was not in a pass
        await supervisor.shutdown(1)

    run(body)
