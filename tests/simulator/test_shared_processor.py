"""One processor for all lanes: work is neither lost nor done twice, and nothing is faster for what runs beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.pipeline.task import COMPUTE, TaskMaker
from moeflow.planner.played_costs import PlayedCost
from moeflow.simulator.shared_processor import (
    DEEP_HANDOFF_S,
    DEEP_S,
    DEEP_WAKE_S,
    HANDOFF_S,
    SLOWED,
    WAKE_S,
    SharedProcessor,
)
from moeflow.simulator.virtual_clock import run_virtually

LANES = (COMPUTE, "host", "up")
times = st.floats(0, 0.01).map(lambda seconds: round(seconds, 6))


def cost(seconds=0.0, core_s=0.0, kernel_s=0.0):
    return PlayedCost(num_bytes=0, num_flops=0, seconds=seconds, core_s=core_s, kernel_s=kernel_s)


def run(*tasks, num_cores=2):
    """Run tasks that wait for nothing: (lane, cost). Return when each begins and ends."""
    make = TaskMaker()
    stream = [make("do", lane=lane) for lane, _ in tasks]
    timed = run_virtually(stream, lambda task: tasks[task.id][1], timer=SharedProcessor(num_cores))
    by_id = {one.task.id: (one.start_s, one.end_s) for one in timed}
    return [by_id[number] for number in range(len(tasks))]


WOKEN = HANDOFF_S + DEEP_HANDOFF_S  # nothing has run before


def test_a_task_alone_takes_its_core_then_its_kernel_or_what_it_plays():
    whole = pytest.approx(WOKEN + 0.001 + DEEP_WAKE_S + 0.002)
    assert run((COMPUTE, cost(core_s=0.001, kernel_s=0.002))) == [(0.0, whole)]
    assert run((COMPUTE, cost(seconds=0.05, core_s=0.001)))[0][1] >= 0.049
    late = run((COMPUTE, cost(kernel_s=0.002)), (COMPUTE, cost(kernel_s=0.001, core_s=0.0001)))
    assert late[1][1] - late[0][1] == pytest.approx(HANDOFF_S + 0.0001 + WAKE_S + 0.001)


def test_kernels_go_one_after_another_and_a_core_beside_one_slows_it_down():
    ends = [end for _, end in run(("host", cost(kernel_s=0.02)), ("up", cost(kernel_s=0.02)))]
    assert max(ends) - min(ends) == pytest.approx(0.02, rel=0.01)
    beside, _ = run(("host", cost(kernel_s=0.01)), ("up", cost(core_s=0.1)))
    assert beside[1] == pytest.approx(WOKEN + (0.01 + DEEP_WAKE_S) * (1 + SLOWED), rel=0.01)


def test_a_lane_that_nobody_has_kept_awake_wakes_late():
    (_, paced), (start, end) = run((COMPUTE, cost(seconds=20 * DEEP_S)), (COMPUTE, cost(core_s=0.001)))
    assert start == paced
    assert end - start > HANDOFF_S + 0.001


@given(st.lists(st.tuples(st.sampled_from(LANES), times, times, times), min_size=1, max_size=12), st.integers(1, 4))
def test_nothing_ends_before_its_work_and_its_pace_are_over(tasks, num_cores):
    costs = [(lane, cost(seconds, core_s, kernel_s)) for lane, seconds, core_s, kernel_s in tasks]
    spans = run(*costs, num_cores=num_cores)
    for (_, one), (start, end) in zip(costs, spans, strict=True):
        assert end - start >= HANDOFF_S + one.core_s + one.kernel_s - 1e-6
    whole = max(end for _, end in spans)
    assert whole >= sum(one.kernel_s for _, one in costs) - 1e-6  # one kernel at a time
    assert whole >= sum(one.core_s for _, one in costs) / num_cores - 1e-6
    for lane in LANES:  # of which the pace may make up for a millisecond
        assert whole >= sum(one.seconds for name, one in costs if name == lane) - 0.001 - 1e-6
