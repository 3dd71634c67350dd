"""The executor on random graphs: each task once, after its inputs; errors travel; interrupts leave nothing running."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.priority import PREFETCH
from moeflow.pipeline.runtime.executor import Cost, Executor
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Trace
from moeflow.pipeline.sequential import sequential
from moeflow.pipeline.task import COMPUTE, Task, TaskMaker


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def lanes(trace: Trace | None = None) -> dict[str, Lane]:
    return {"link": Lane("link", trace=trace), "disk": Lane("disk", 3, trace=trace)}


@pytest.fixture
def two_lanes() -> Iterator[dict[str, Lane]]:
    both = lanes()
    yield both
    for lane in both.values():
        lane.close()


@st.composite
def graphs(draw, names=(COMPUTE, "link", "disk"), max_size=40):
    tasks = []
    for number in range(draw(st.integers(0, max_size))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        lane, priority = draw(st.sampled_from(names)), draw(st.integers(0, 2))
        tasks.append(Task(number, "do", None, None, lane, tuple(after), priority))
    return tasks


@given(tasks=graphs(), bad=st.sets(st.integers(0, 40), max_size=3), window=st.sampled_from([1, 2, 7, 256]))
@settings(max_examples=40)
def test_each_task_runs_once_after_its_inputs_until_one_fails(tasks, bad, window):
    log: list[tuple[str, int]] = []
    errors = {number: OSError(number) for number in bad & {task.id for task in tasks}}

    def do(task: Task) -> None:
        log.append(("start", task.id))
        if task.id in bad:
            raise errors[task.id]
        log.append(("end", task.id))

    both = lanes()
    with pytest.raises(OSError, match=r"\d") if errors else contextlib.nullcontext() as failed:
        Executor({"do": do}, both, window=window).run(tasks)
    for lane in both.values():
        lane.close()

    starts = [number for what, number in log if what == "start"]
    assert len(starts) == len(set(starts))
    if failed is None:
        assert len(starts) == len(tasks)
    else:
        assert any(failed.value is errors[number] for number in starts if number in errors)
    for task in tasks:
        for before in task.after if task.id in starts else ():
            assert log.index(("end", before)) < log.index(("start", task.id))


@given(tasks=graphs(names=(COMPUTE,), max_size=8))
@settings(max_examples=60)
def test_of_what_could_run_here_the_urgent_goes_first_then_the_earlier(tasks):
    expected: list[int] = []
    while len(expected) < len(tasks):
        free = [t for t in tasks if t.id not in expected and set(t.after) <= set(expected)]
        expected.append(min(free, key=lambda t: (t.priority, t.id)).id)
    ran: list[int] = []
    Executor({"do": lambda task: ran.append(task.id)}, {}).run(tasks)
    assert ran == expected


@given(tasks=graphs(names=(COMPUTE, "up", "down"), max_size=8))
@settings(max_examples=60)
def test_launches_of_the_caller_go_before_its_other_tasks(tasks):
    expected: list[int] = []
    while len(expected) < len(tasks):
        free = [t for t in tasks if t.id not in expected and set(t.after) <= set(expected)]
        expected.append(min(free, key=lambda t: (t.lane == COMPUTE, t.priority, t.id)).id)
    ran: list[tuple[int, int]] = []
    do = {"do": lambda task: ran.append((task.id, threading.get_ident()))}
    Executor(do, {}, launching=("up", "down")).run(tasks)
    assert ran == [(number, threading.get_ident()) for number in expected]


def test_demand_overtakes_prefetch_in_another_lane(two_lanes):
    make, ran, all_are_queued = TaskMaker(), [], threading.Event()

    def hold(_: Task) -> None:
        assert all_are_queued.wait(60)

    tasks = [make("hold", lane="link")]
    tasks += [make("do", lane="link", priority=PREFETCH) for _ in range(3)]
    tasks += [make("do", lane="link") for _ in range(2)]
    tasks += [make("open")]
    ops = {"hold": hold, "do": lambda task: ran.append(task.id), "open": lambda _: all_are_queued.set()}
    Executor(ops, two_lanes).run(tasks)
    assert ran == [4, 5, 1, 2, 3]


def test_lanes_work_at_once_and_chains_go_on_while_the_caller_computes(two_lanes):
    """A chain over two other lanes ends while the caller is inside one task: no lane waits for the caller."""
    make, is_over = TaskMaker(), threading.Event()

    def compute(_: Task) -> None:
        assert is_over.wait(60)

    first = make("nothing", lane="link")
    second = make("nothing", lane="disk", after=[first])
    tasks = [first, second, make("tell", lane="link", after=[second]), make("compute")]
    Executor({"compute": compute, "nothing": lambda _: None, "tell": lambda _: is_over.set()}, two_lanes).run(tasks)


def test_own_tasks_run_in_the_calling_thread(two_lanes):
    threads: dict[str, set[str]] = {}

    def note(task: Task) -> None:
        threads.setdefault(task.lane, set()).add(threading.current_thread().name)

    make = TaskMaker()
    Executor({"note": note}, two_lanes).run([make("note", lane=lane) for lane in (COMPUTE, "link", "disk") * 5])
    assert threads[COMPUTE] == {threading.current_thread().name}
    assert threads["link"] == {"lane link"}
    assert threads["disk"] <= {"lane disk 0", "lane disk 1", "lane disk 2"}


def test_an_endless_stream_is_read_only_so_far_ahead(two_lanes):
    num_made = num_done = 0

    def endless() -> Iterator[Task]:
        nonlocal num_made
        make, last = TaskMaker(), None
        while True:
            load = make("do", lane="link", after=[last])
            num_made += 1
            yield load
            last = make("do", after=[load])
            num_made += 1
            yield last

    def do(task: Task) -> None:
        nonlocal num_done
        assert num_made - num_done <= 21
        num_done += 1
        if task.id == 2001:
            raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration):
        Executor({"do": do}, two_lanes, window=20).run(endless())
    assert num_done == 2002


def test_run_stops_at_the_first_failure(two_lanes):
    make, ran = TaskMaker(), []
    load = make("fail", lane="link")
    tasks = [load, *(make("do", after=[load]) for _ in range(5))]
    with pytest.raises(OSError, match="bad sector"):
        Executor({"fail": fail, "do": lambda task: ran.append(task.id)}, two_lanes).run(tasks)
    assert ran == []


def fail(task: Task) -> None:
    raise OSError("bad sector")


@pytest.mark.parametrize("lane", [COMPUTE, "link"])
def test_a_failure_keeps_nothing_alive(two_lanes, lane):
    class Tensor:
        pass

    references = []

    def leak(task: Task) -> None:
        tensor = Tensor()
        references.append(weakref.ref(tensor))
        raise OSError("bad sector")

    gc.disable()
    try:
        with contextlib.suppress(OSError):  # pytest.raises would keep the error
            Executor({"leak": leak}, two_lanes).run([TaskMaker()("leak", lane=lane)])
        two_lanes["link"].submit(int).result()  # so that its thread has let go of the last
        assert [reference() for reference in references] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ([Task(0, "nap", None, None, COMPUTE)], "no op 'nap', only do"),
        ([Task(0, "do", None, None, "moon")], "no lane 'moon', only compute, link, disk"),
        ([Task(0, "do", None, None, COMPUTE, after=(0,))], "do not come before"),
        ([Task(1, "do", None, None, COMPUTE)], "where task 0 should"),
    ],
)
def test_a_stream_that_cannot_be_run_is_refused(two_lanes, tasks, complaint):
    with pytest.raises(ValueError, match=complaint):
        Executor({"do": fail}, two_lanes).run(tasks)


def test_a_lane_that_is_closed_fails_its_tasks_and_none_after_them_runs():
    both, make, ran = lanes(), TaskMaker(), []
    both["link"].close()
    load = make("do", lane="link")
    with pytest.raises(CancelledError):
        Executor({"do": lambda task: ran.append(task.id)}, both).run([load, make("do", after=[load])])
    both["disk"].close()
    assert ran == []


def test_an_interrupt_ends_the_run_once_nothing_runs(two_lanes):
    make, ran, is_in = TaskMaker(), [], threading.Event()

    def slow(task: Task) -> None:
        is_in.set()
        time.sleep(0.02)
        ran.append(task.id)

    def interrupt(task: Task) -> None:
        is_in.wait(60)
        signal.raise_signal(signal.SIGINT)

    tasks = [make("slow", lane="link") for _ in range(5)]
    tasks.append(make("interrupt"))
    with pytest.raises(KeyboardInterrupt):
        Executor({"slow": slow, "interrupt": interrupt}, two_lanes).run(tasks)
    assert ran == [0]
    assert two_lanes["link"].submit(int, "5").result() == 5
    assert ran == [0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may strike inside a finalizer
def test_interrupts_at_any_moment_leave_nothing_running(two_lanes):
    """An alarm raises KeyboardInterrupt somewhere in the run, again and again."""
    running = 0
    lock = threading.Lock()

    def do(task: Task) -> None:
        nonlocal running
        with lock:
            running += 1
        time.sleep(1e-5)
        with lock:
            running -= 1

    def do_here(task: Task) -> None:
        time.sleep(1e-5)

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    make, last = TaskMaker(), None
    tasks, ops = [], {"do": do, "do here": do_here}
    for number in range(60):
        op, lane = [("do", "link"), ("do here", COMPUTE), ("do", "disk")][number % 3]
        last = make(op, lane=lane, after=[last] if number % 4 else [])
        tasks.append(last)
    before = signal.signal(signal.SIGALRM, ring)
    num_interrupted = 0
    try:
        for number in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 1e-4)
                Executor(ops, two_lanes, window=30).run(tasks)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupted += 1
            assert running == 0
            Executor(ops, two_lanes).run(tasks[:9])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted


def test_the_trace_has_costs_tasks_and_waits():
    trace = Trace()
    both = lanes(trace)

    def load(task: Task) -> Cost:
        time.sleep(0.005)
        return Cost(num_bytes=1000)

    make = TaskMaker()
    first = make("load", 0, lane="link")
    tasks = [first, make("compute", 0, 1, after=[first])]
    Executor({"load": load, "compute": lambda _: Cost(flops=7)}, both, trace=trace).run(tasks)
    for lane in both.values():
        lane.close()
    spans = {row.name: list(row.spans) for row in trace.rows}
    (link,) = spans["link"]
    wait, compute = spans[COMPUTE]
    assert link.label == ("load", 0, None, 1000, 0, 0, (), ())
    assert compute.label == ("compute", 0, 1, 0, 7, 1, (0,), ())
    assert wait.label.name == "waits for load"
    assert wait.is_blocked
    assert link.end_ns <= compute.start_ns
    assert wait.end_ns <= compute.start_ns


def test_sequential_runs_in_its_own_order_and_needs_no_lane():
    ran: list[Task] = []
    ops = dict.fromkeys(("load_weights", "pre_attention", "attention", "post_attention"), ran.append)
    Executor(ops, {}).run(sequential(3, 2))
    assert ran == list(sequential(3, 2))
