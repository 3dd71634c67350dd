"""Engines side by side: one queue, first come, first served; a dead, stopped or slow one delays no other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.engine_messages import EngineStats, RankStats, SpeculatorStats, TokenOutput, TrialStats
from moeflow.core.errors import CapacityError, EngineError
from moeflow.core.request import FinishReason
from moeflow.engine.client import EngineState
from moeflow.processes import slowness
from moeflow.processes.continuation import Continuation
from moeflow.processes.deaths import Death
from moeflow.processes.nodes.engine_places import RankPlaces
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.slowness import LargestPass, SlowWatch
from moeflow.processes.stats_sum import summed, totals_of, with_totals
from moeflow.processes.supervisor import Supervisor
from moeflow.scheduler.dispatch import BATCH_BACKLOG
from tests.engine.fake_runner import scheduler_config
from tests.processes.mortal_engine import CRASH, OUTSIDE, Loss, MortalEngine, World
from tests.processes.test_supervisor import (
    REQUESTS,
    FastLimits,
    check_whole,
    has,
    read,
    run,
    submission,
    supervise,
    tokens,
    until,
)


def engines(supervisor: Supervisor) -> list[MortalEngine]:
    return [replica.engine for replica in supervisor._replicas]


def placed(world: World, supervisor: Supervisor) -> list[tuple[int, str]]:
    """Return which replica got which request, in order; only while none has died."""
    numbers = {id(engine): number for number, engine in enumerate(engines(supervisor))}
    return [(numbers[id(engine)], each.request_id) for engine, each in world.submitted]


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    kills=st.dictionaries(st.integers(0, 90), st.sampled_from(Loss), max_size=10),
    stops=st.dictionaries(st.integers(0, 60), st.integers(1, 40), max_size=4),
    start_turns=st.integers(0, 60),
    num_replicas=st.integers(2, 4),
)
@settings(max_examples=60)
def test_killed_and_stopped_at_random_streams_are_those_of_one_engine(
    requests, kills, stops, start_turns, num_replicas
):
    """No token is lost, repeated or changed, for any engines that compute a request; and no request is left."""
    submissions = [
        submission(
            f"r{index}",
            prompt,
            num,
            is_batch=batch,
            sampling={"prompt_logprobs": logprobs, "prompt_progress": logprobs is None},
        )
        for index, (prompt, num, batch, logprobs, _) in enumerate(requests)
    ]

    async def body() -> None:
        world = World(kills, stops=stops, start_turns=start_turns, num_blocks=12, max_num_seqs=2)
        supervisor = await supervise(world, num_replicas=num_replicas)
        arrivals = [turns for *_, turns in requests]
        streams = (read(supervisor, *each) for each in zip(submissions, arrivals, strict=True))
        for each, outputs in zip(submissions, await asyncio.gather(*streams), strict=True):
            check_whole(each, outputs)
        assert supervisor.stats().engine_restarts_total == world.num_deaths
        world.stops.clear()
        await until(lambda: supervisor.stats().num_running == supervisor.stats().num_waiting == 0)
        await supervisor.shutdown(1)

    run(body)


@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=30),
    num_replicas=st.integers(2, 4),
)
@settings(max_examples=40)
def test_first_come_first_served_over_all_replicas(requests, num_replicas):
    """Batch requests come after interactive ones. No request waits in an engine, and every free place gets work."""
    asked = [submission(f"r{index}", [index % 4], num, is_batch=batch) for index, (num, batch) in enumerate(requests)]

    async def body() -> None:
        world = World(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=40)
        supervisor = await supervise(world, num_replicas=num_replicas)
        readers = [asyncio.create_task(read(supervisor, each)) for each in asked]
        await asyncio.sleep(0)
        interactive = [each.request_id for each in asked if not each.is_batch]
        begun = [name for _, name in placed(world, supervisor)]
        assert [name for name in begun if name in interactive] == interactive[: 2 * num_replicas]
        for each, outputs in zip(asked, await asyncio.gather(*readers), strict=True):
            check_whole(each, outputs)
        order = [name for _, name in placed(world, supervisor) if name in interactive]
        assert order == interactive
        assert not supervisor.stats().preemptions_total
        await supervisor.shutdown(1)

    run(body)


def test_with_fewer_requests_than_replicas_each_has_one_to_itself_in_turn():
    async def body() -> None:
        world = World(num_blocks=40)
        supervisor = await supervise(world, num_replicas=3)
        long = [asyncio.create_task(read(supervisor, submission(name, [1], 40))) for name in ("a", "b")]
        await until(lambda: supervisor.stats().num_running == 2)
        for name in ("c", "d"):  # the third is free again for each of them
            await read(supervisor, submission(name, [1], 2))
        await asyncio.gather(*long)
        for name in ("e", "f", "g"):
            await read(supervisor, submission(name, [1], 2))
        assert placed(world, supervisor) == [
            *((0, "a"), (1, "b"), (2, "c"), (2, "d")),
            *((0, "e"), (1, "f"), (2, "g")),
        ]
        await supervisor.shutdown(1)

    run(body)


def test_who_has_no_blocks_left_gets_nothing_more():
    """Its places are free, but earlier requests wait there already."""

    async def body() -> None:
        world = World(num_blocks=12, max_num_seqs=8, max_num_batched_tokens=40)
        supervisor = await supervise(world, num_replicas=2)
        large = [asyncio.create_task(read(supervisor, submission(f"l{n}", [n] * 28, 20))) for n in range(4)]
        await until(lambda: supervisor.stats().num_running == 2 and supervisor.stats().num_waiting == 2)
        late = asyncio.create_task(read(supervisor, submission("late", [1], 1)))
        await asyncio.sleep(0)
        assert "late" not in [name for _, name in placed(world, supervisor)]
        assert supervisor.stats().num_waiting == 3
        check_whole(submission("late", [1], 1), await late)
        await asyncio.gather(*large)
        await supervisor.shutdown(1)

    run(body)


def test_what_an_engine_cannot_begin_with_soon_is_left_to_whoever_can_sooner():
    """All that arrive at once, or that come from a dead engine, would else stand in queues that others cannot help."""

    async def body() -> None:
        world = World(num_blocks=160, max_num_seqs=8, max_num_batched_tokens=8)
        supervisor = await supervise(world, num_replicas=2)
        asked = [submission(f"r{number}", [number % 4] * 5, 30) for number in range(12)]
        readers = [asyncio.create_task(read(supervisor, each)) for each in asked]
        await asyncio.sleep(0)
        assert [number for number, _ in placed(world, supervisor)] == [0, 1, 0, 1]  # two are more than a pass takes
        await until(lambda: len(world.submitted) == 12)
        assert not supervisor.stats().requests_finished_total
        for each, outputs in zip(asked, await asyncio.gather(*readers), strict=True):
            check_whole(each, outputs)
        await supervisor.shutdown(1)

    run(body)


def test_of_batch_jobs_an_engine_gets_more_than_it_computes_together_and_others_go_first():
    async def body() -> None:
        world = World(num_blocks=80, max_num_seqs=1)
        supervisor = await supervise(world, num_replicas=2)
        jobs = [submission(f"job-{number}", [1], 2, is_batch=True) for number in range(20)]
        readers = [asyncio.create_task(read(supervisor, each)) for each in jobs]
        await asyncio.sleep(0)
        assert len(world.submitted) == 2 * BATCH_BACKLOG
        stats = supervisor.stats()
        assert stats.num_batch_waiting == stats.num_waiting >= 20 - 2 * BATCH_BACKLOG
        check_whole(submission("now", [1], 2), await read(supervisor, submission("now", [1], 2)))
        assert "now" in [name for _, name in placed(world, supervisor)[: 2 * BATCH_BACKLOG + 1]]
        for each, outputs in zip(jobs, await asyncio.gather(*readers), strict=True):
            check_whole(each, outputs)
        await supervisor.shutdown(1)

    run(body)


def test_requests_of_a_dead_engine_do_not_wait_for_another():
    async def body() -> None:
        world = World({3: Loss.LATE}, start_turns=10, num_blocks=40)
        supervisor = await supervise(world, num_replicas=2)
        world.start_turns = 10**9
        asked = [submission(f"r{number}", [number], 8) for number in range(4)]
        for each, outputs in zip(asked, await asyncio.gather(*(read(supervisor, each) for each in asked)), strict=True):
            check_whole(each, outputs)
        assert world.num_deaths == 1
        assert supervisor.state is EngineState.READY
        assert supervisor.back_in_s == 0
        assert sorted(status.state for status in supervisor.replicas()) == [EngineState.READY, EngineState.RESTARTING]
        await supervisor.shutdown(0)
        assert supervisor.state is EngineState.GONE

    run(body)


def test_one_that_is_back_gets_work_again():
    async def body() -> None:
        world = World({0: Loss.IN_PASS}, num_blocks=40)
        supervisor = await supervise(world, num_replicas=2)
        await read(supervisor, submission("first", [1]))
        await until(lambda: all(status.state is EngineState.READY for status in supervisor.replicas()))
        before = len(world.submitted)
        await asyncio.gather(*(read(supervisor, submission(f"r{number}", [1])) for number in range(2)))
        assert {id(engine) for engine, _ in world.submitted[before:]} == {id(engine) for engine in engines(supervisor)}
        assert [status.stats.engine_restarts_total for status in supervisor.replicas()] == [1, 0]
        await supervisor.shutdown(1)

    run(body)


@pytest.mark.parametrize("asks", [False, True])
def test_an_engine_gets_no_more_before_a_long_prompt_is_computed_whether_its_progress_is_reported_or_not(asks):
    async def body() -> None:
        world = World(num_blocks=40, max_num_batched_tokens=8)
        supervisor = await supervise(world, num_replicas=2)
        long = [submission(f"long{n}", [n] * 21, 6, sampling={"prompt_progress": asks}) for n in range(2)]
        asked = [*long, submission("short", [1, 3], 6)]
        for each, outputs in zip(asked, await asyncio.gather(*(read(supervisor, each) for each in asked)), strict=True):
            check_whole(each, outputs)
        beside = next(batch for batch in world.batches if batch.pop("short", None) is not None)
        assert len(beside) == 1
        assert min(beside.values()) > 0  # tokens of the answer
        await supervisor.shutdown(1)

    run(body)


@pytest.mark.parametrize("world", [World({0: Loss.IN_PASS}), World(stops={0: 20})], ids=["killed", "stopped"])
def test_what_was_to_begin_in_one_that_is_back_has_begun_elsewhere(world):
    async def body() -> None:
        world.start_turns = 20
        supervisor = await supervise(world, num_replicas=2)
        first = submission("first", [1] * 9, 30)  # no pass takes it whole
        reading = asyncio.create_task(read(supervisor, first))
        await until(lambda: supervisor.replicas()[0].state is not EngineState.READY)
        await until(lambda: supervisor.replicas()[0].state is EngineState.READY)
        await read(supervisor, submission("second", [1], 2))
        assert not reading.done()
        assert [each.request_id for engine, each in world.submitted if engine is engines(supervisor)[0]][-1] == "second"
        check_whole(first, await reading)
        await supervisor.shutdown(1)

    run(body)


def test_requests_of_a_stopped_engine_go_on_in_another_and_it_gets_work_again_when_it_goes_on():
    async def body() -> None:
        world = World(stops={2: 10**9}, num_blocks=40)
        supervisor = await supervise(world, num_replicas=2)
        asked = [submission(f"r{number}", [number], 12) for number in range(4)]
        for each, outputs in zip(asked, await asyncio.gather(*(read(supervisor, each) for each in asked)), strict=True):
            check_whole(each, outputs)
        (stopped,) = (engine for engine in engines(supervisor) if engine.state is EngineState.STALLED)
        assert supervisor.state is EngineState.READY
        assert world.num_deaths == 0
        stopped._stopped_turns = 1
        await until(lambda: stopped.state is EngineState.READY)
        await until(lambda: not stopped._engine.has_work)
        assert stopped.stats().requests_cancelled_total
        again = [submission(each.request_id, each.prompt_token_ids, 12) for each in asked]  # even under the same names
        for each, outputs in zip(again, await asyncio.gather(*(read(supervisor, each) for each in again)), strict=True):
            check_whole(each, outputs)
        assert stopped in [engine for engine, _ in world.submitted[-4:]]
        await supervisor.shutdown(1)

    run(body)


def test_with_nobody_else_requests_of_a_stopped_engine_wait_for_it():
    async def body() -> None:
        world = World(stops={1: 30, 2: 30}, num_blocks=40)
        supervisor = await supervise(world, num_replicas=2)
        asked = [submission(f"r{number}", [number], 6) for number in range(2)]
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        await until(lambda: supervisor.state is EngineState.STALLED)
        for each, outputs in zip(asked, await reading, strict=True):
            check_whole(each, outputs)
        await supervisor.shutdown(1)

    run(body)


def test_a_slow_engine_keeps_its_requests_and_gets_no_others():
    async def body() -> None:
        world = World(num_blocks=40, max_num_seqs=8)
        supervisor = await supervise(world, num_replicas=2)
        slow, quick = engines(supervisor)
        kept = submission("kept", [1], 40)
        keeping = asyncio.create_task(read(supervisor, kept))
        await until(lambda: slow.stats().num_running == 1)
        slow.pass_s, quick.longest_pass_s = 5.1, 1.2  # more than four times as long
        await asyncio.sleep(0.001)
        assert not supervisor.replicas()[0].is_slow  # the other one has computed nothing that it could be compared with
        await read(supervisor, submission("first", [1], 1))
        await until(lambda: supervisor.replicas()[0].is_slow)
        others = [submission(f"r{number}", [number], 3) for number in range(6)]
        await asyncio.gather(*(read(supervisor, each) for each in others))
        assert [number for number, _ in placed(world, supervisor)] == [0, 1, 1, 1, 1, 1, 1, 1]
        check_whole(kept, await keeping)
        quick.state = EngineState.STALLED  # better slow than not at all
        assert tokens(await read(supervisor, submission("last", [1], 3)))
        assert placed(world, supervisor)[-1] == (0, "last")
        await supervisor.shutdown(1)

    run(body)


def test_what_slow_is_and_for_how_long():
    now_s = 100.0
    watch = SlowWatch(lambda: now_s)
    assert not watch.is_slow
    watch.note(4.0, 1.0)
    watch.note(80.0, 20.0)
    assert not watch.is_slow
    watch.note(4.5, 1.0)
    assert watch.is_slow
    now_s += slowness.REST_S - 0.1
    watch.note(0.0, 1.0)
    assert watch.is_slow
    now_s += 0.2
    assert not watch.is_slow


def test_what_a_pass_may_take_by_what_others_took():
    largest = LargestPass()
    largest.note(8, 0.0)
    assert largest.expect_s(8) == 1.0  # not known more closely
    assert largest.expect_s(512) == 64.0  # only short passes were seen
    largest.note(512, 5.0)
    largest.note(9, 5.0)
    assert [largest.expect_s(num_tokens) for num_tokens in (8, 512)] == [5.0, 5.0]


def test_a_long_prompt_is_not_slow_beside_one_that_computed_little_or_was_just_started_again():
    async def body() -> None:
        world = World(num_blocks=40, max_num_batched_tokens=40)
        supervisor = await supervise(world, num_replicas=2)
        other, busy = supervisor._replicas
        await read(supervisor, submission("short", [1], 1))  # in the first: a prompt token, and one more
        reading = asyncio.create_task(read(supervisor, submission("long", [2] * 20, 20)))
        await asyncio.sleep(0)
        assert busy.requests
        busy.engine.pass_s = 4 * 21 / 2
        busy.compare([other])
        assert not busy.is_slow
        busy.engine.pass_s += 0.1
        busy.compare([other])
        assert busy.is_slow
        await reading
        engine = other.engine
        engine.longest_pass_s = 10.0
        engine._on_change()
        engine._death = OUTSIDE
        engine._living.cancel()
        engine._on_failure()
        await until(lambda: other.state is EngineState.READY)
        assert other.engine is not engine
        assert (other.largest.num_tokens, other.largest.longest_s) == (2, 10.0)
        await supervisor.shutdown(1)

    run(body)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_request_that_kills_is_found_wherever_it_goes(num_replicas):
    async def body() -> None:
        world = World(is_deadly=has("deadly", 2), num_blocks=40, max_num_batched_tokens=40)
        supervisor = await supervise(world, num_replicas=num_replicas)
        good = [submission(f"good-{number}", [number, 1], 12) for number in range(5)]
        outputs, *others = await asyncio.gather(
            *(read(supervisor, each) for each in (submission("deadly", [9], 12), *good))
        )
        for each, answer in zip(good, others, strict=True):
            check_whole(each, answer)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "died of this request" in outputs[-1].error
        assert world.num_deaths == 2
        assert [each.request_id for _, each in world.submitted].count("deadly") == 2
        await supervisor.shutdown(1)

    run(body)


def test_a_death_says_nothing_of_who_has_come_further_since_that_pass():
    request = Continuation(submission("r", [1]))
    for token in (4, 5, 6):
        request.receive(TokenOutput(request_id="r", token_ids=[token]))
    request.suspect(Death("SIGSEGV", in_pass={"r": 2}))
    assert request.rest().isolated_until == 0
    request.suspect(Death("SIGSEGV", in_pass={"r": 3}))
    assert request.rest().isolated_until == 4


def test_who_came_further_elsewhere_is_not_to_blame_for_the_end_of_an_engine_that_it_has_left():
    """A stopped engine is ended in the end; its last pass is still that of requests that have long gone on."""

    async def body() -> None:
        world = World(stops={2: 10**9}, num_blocks=40, max_num_seqs=2)
        supervisor = await supervise(world, num_replicas=2)
        asked = submission("r", [1], 30)
        reading = asyncio.create_task(read(supervisor, asked))
        await until(lambda: len(world.submitted) == 2)
        stopped, other = world.submitted[0][0], world.submitted[1][0]
        await until(lambda: other.stats().generated_tokens_total > 3)
        stopped._death = type(CRASH)(CRASH.reason, in_pass={"r": 2})
        stopped._on_failure()
        await until(lambda: supervisor.stats().engine_restarts_total == 1)
        other._death = type(OUTSIDE)(OUTSIDE.reason, is_from_outside=True)  # and now the other is killed as well
        other._living.cancel()
        other._on_failure()
        check_whole(asked, await reading)
        assert [each.isolated_until for _, each in world.submitted] == [0, 0, 0]
        await supervisor.shutdown(1)

    run(body)


def test_the_others_live_on_when_one_has_died_for_good():
    async def body() -> None:
        failures: list[int] = []
        world = World({0: Loss.IN_PASS}, num_blocks=40)
        supervisor = await supervise(world, FastLimits, 2, on_failure=lambda: failures.append(1))
        world.fail_starts = 10**6
        check_whole(submission("r", [1]), await read(supervisor, submission("r", [1])))
        await until(lambda: EngineState.GONE in [status.state for status in supervisor.replicas()])
        check_whole(submission("s", [1]), await read(supervisor, submission("s", [1])))
        assert supervisor.state is EngineState.READY
        assert not failures
        world.kills = {world.num_passes: Loss.IN_PASS}
        with pytest.raises(EngineError, match="died for good"):
            await read(supervisor, submission("t", [1]))
        assert failures == [1]
        assert supervisor.state is EngineState.GONE
        await supervisor.shutdown(1)

    run(body)


def test_a_shutdown_lets_those_finish_that_wait_for_a_place_also_through_deaths():
    async def body() -> None:
        world = World({6: Loss.IN_PASS}, num_blocks=40, max_num_seqs=1)
        supervisor = await supervise(world, num_replicas=2)
        asked = [submission(f"r{number}", [number], 6) for number in range(6)]
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        await until(lambda: supervisor.stats().num_running == 2)
        await supervisor.shutdown(30)
        for each, outputs in zip(asked, await reading, strict=True):
            check_whole(each, outputs)
        assert world.num_deaths == 1
        with pytest.raises(EngineError, match="shut down"):
            await read(supervisor, submission("late", [1]))

    run(body)


def test_who_waits_for_a_place_may_leave():
    async def body() -> None:
        world = World(num_blocks=40, max_num_seqs=1)
        supervisor = await supervise(world, num_replicas=2)
        running = [asyncio.create_task(read(supervisor, submission(f"r{number}", [1], 30))) for number in range(2)]
        await until(lambda: supervisor.stats().num_running == 2)
        leaving = asyncio.create_task(read(supervisor, submission("leaving", [1])))
        await until(lambda: supervisor.stats().num_waiting == 1)
        leaving.cancel()
        await until(leaving.done)
        running[0].cancel()
        await until(lambda: supervisor.stats().requests_cancelled_total == 1)
        check_whole(submission("r1", [1], 30), await running[1])
        assert [name for _, name in placed(world, supervisor)] == ["r0", "r1"]
        await supervisor.shutdown(1)

    run(body)


def test_if_one_cannot_be_loaded_none_is_left():
    async def body() -> None:
        world = World()
        engines: list[MortalEngine] = []
        numbers = itertools.count()

        async def start(**callbacks: Callable[[], None]) -> MortalEngine:
            if next(numbers) == 1:
                raise CapacityError("too little memory")
            engines.append(await world.start(**callbacks))
            return engines[-1]

        with pytest.raises(CapacityError, match="too little"):
            await Supervisor([start] * 3, RestartLimits, scheduler=scheduler_config()).load()
        assert len(engines) == 2
        assert all(engine._living.done() for engine in engines)

    run(body)


def test_together_they_hold_as_much_as_all_of_them():
    async def body() -> None:
        supervisor = await supervise(World(num_blocks=40, max_num_seqs=4), num_replicas=3)
        assert supervisor.model.max_num_seqs == 12
        assert supervisor.model.kv_capacity_tokens == 3 * 160
        assert supervisor.model.max_model_len == 48
        await supervisor.shutdown(1)

    run(body)


def test_statistics_of_several_engines():
    one = EngineStats(num_running=1, kv_blocks_total=10, passes_total=7, tokens_per_second=1.5, is_prefetching=True)
    ranks = [RankStats(waited_s_total=each) for each in (1.0, 2.0)]
    trials = [TrialStats(name="prefetching", reason="slow")]
    other = EngineStats(
        num_running=2, kv_blocks_total=10, passes_total=3, trials=trials, ranks=ranks, rank_imbalance=1.25
    )
    both = summed([one, other])
    assert (both.num_running, both.kv_blocks_total, both.passes_total, both.tokens_per_second) == (3, 20, 10, 1.5)
    assert (both.is_prefetching, both.is_engine_stalled, both.trials) == (True, False, trials)
    assert (both.ranks, both.rank_imbalance) == (ranks, 1.25)
    assert summed([other, other]).ranks == ranks * 2
    assert summed([one]) == one
    after = with_totals(other, totals_of(one))
    assert (after.num_running, after.passes_total, after.kv_blocks_total) == (2, 10, 10)


def test_speculators_of_several_engines_are_counted_together():
    def stats(drafted, accepted, **values):
        speculator = SpeculatorStats(
            name="suffix", drafted_total=drafted, accepted_total=accepted, drafting_s_total=0.5, **values
        )
        return EngineStats(trees_total=[3, 1], speculators=[speculator])

    one, other = stats([4, 2], [3, 1], is_resting=True), stats([1, 1], [0, 1])
    both = summed([one, other])
    assert both.trees_total == [6, 2]
    (speculator,) = both.speculators
    assert (speculator.drafted_total, speculator.accepted_total) == ([5, 3], [3, 2])
    assert speculator.drafting_s_total == 1.0
    after = with_totals(other, totals_of(one))  # of an engine that died
    assert after.trees_total == [6, 2]
    assert after.speculators == [msgspec.structs.replace(speculator, is_resting=False)]
    fresh = with_totals(EngineStats(), totals_of(one))  # the one in its place has told nothing yet
    assert (fresh.trees_total, fresh.speculators[0].drafted_total) == ([3, 1], [4, 2])
    two = msgspec.structs.replace(other.speculators[0], name="draft")
    assert [one.name for one in summed([one, msgspec.structs.replace(other, speculators=[two])]).speculators] == [
        "suffix",
        "draft",
    ]


class Places:
    """A given number of places on other machines."""

    ranks = RankPlaces()

    def __init__(self, world: World, number: int) -> None:
        self._world, self.free = world, asyncio.Semaphore(number)

    async def start(self, **callbacks) -> MortalEngine:
        await self.free.acquire()
        return await self._world.start(**callbacks)

    def add_keepers(self, number: int) -> int:
        return number

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def states(supervisor: Supervisor) -> list[tuple[str, EngineState]]:
    return [(replica.name, replica.state) for replica in supervisor._replicas]


def test_replicas_without_a_place_go_first_and_their_return_is_unknown():
    async def body():
        world = World()
        places = Places(world, 2)
        limits = partial(RestartLimits, 0)
        supervisor = Supervisor([places.start] * 3, limits, scheduler=scheduler_config(), places=places)
        await supervisor.load()
        await until(lambda: sum(it is EngineState.READY for _, it in states(supervisor)) == 2)
        supervisor.scale(4)
        await until(lambda: len(states(supervisor)) == 4)
        places.free.release()
        await until(lambda: sum(it is EngineState.READY for _, it in states(supervisor)) == 3)
        (pending,) = (name for name, state in states(supervisor) if state is EngineState.RESTARTING)
        left = [it for it in states(supervisor) if it[0] != pending]
        supervisor.scale(3)
        assert states(supervisor) == left
        supervisor.scale(4)
        assert states(supervisor) == [*left, (pending, EngineState.RESTARTING)]
        for replica in supervisor._replicas[:3]:
            replica.engine._death = OUTSIDE
            replica._note_failure()
        await until(lambda: [it for _, it in states(supervisor)] == [EngineState.GONE] * 3 + [EngineState.RESTARTING])
        assert supervisor.back_in_s > 30  # requests are better refused
        await supervisor.shutdown(0)

    run(body)


def leave(engine: MortalEngine) -> None:
    engine.state = EngineState.DRAINING
    engine._on_change()


async def with_places(world: World, number: int) -> Supervisor:
    places = Places(world, number)
    limits = partial(RestartLimits, 0)
    supervisor = Supervisor([places.start] * number, limits, scheduler=scheduler_config(), places=places)
    await supervisor.load()
    await until(lambda: [it for _, it in states(supervisor)] == [EngineState.READY] * number)
    return supervisor


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_machines_that_all_leave_compute_what_waits(number, ends):
    async def body():
        world = World(num_blocks=40, max_num_seqs=1)
        supervisor = await with_places(world, number)
        leaving = engines(supervisor)
        asked = [submission(f"r{at}", [at], 6) for at in range(6)]
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        await until(lambda: len(world.submitted) >= number)
        if number > 1:
            world.kills = {world.num_passes + 1: Loss.IN_PASS}  # its requests continue in the other
        ending = asyncio.create_task(supervisor.shutdown(30)) if ends else None
        await asyncio.sleep(0)
        for engine in leaving:
            leave(engine)
        for each, outputs in zip(asked, await reading, strict=True):
            check_whole(each, outputs)
        await (ending or until(lambda: all(engine._living.done() for engine in leaving)))
        await supervisor.shutdown(0)

    run(body)


def test_totals_include_those_of_removed_replicas():
    async def body():
        supervisor = await with_places(World(num_blocks=40), 3)
        await asyncio.gather(*(read(supervisor, submission(f"r{at}", [at])) for at in range(3)))
        want = totals_of(supervisor.stats())
        assert want.generated_tokens_total == 18
        leave(engines(supervisor)[0])
        await until(lambda: len(supervisor.replicas()) == 3)
        assert totals_of(supervisor.stats()) == want
        supervisor.scale(1)
        assert totals_of(supervisor.stats()) == want
        await supervisor.shutdown(0)

    run(body)
