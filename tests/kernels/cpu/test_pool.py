"""The threads of the CPU extension do their work, end on request, and survive forks, exits and each other."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from tests.kernels.cpu.forked_scripts import PREAMBLE, run_forked

pytestmark = pytest.mark.usefixtures("needs_kernels")

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")


def num_os_threads():
    return len(os.listdir("/proc/self/task"))


def test_the_number_of_threads_is_what_was_set():
    for count in (1, 4, 2):
        extension.set_num_threads(count)
        assert extension.num_threads() == count


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="at least 1 can"):
        extension.set_num_threads(0)


@pytest.mark.parametrize("count", [2, 3, 8, 11])
@pytest.mark.parametrize("outputs", [16, 200, 3000])
def test_every_item_is_computed_however_many_threads_share_them(count, outputs):
    weight, x = PackedWeight.pack(torch.randn(outputs, 64), "int8"), torch.randn(150, 64)
    extension.set_num_threads(1)
    want = extension.linear(x, weight)
    extension.set_num_threads(count)
    for _ in range(20):
        assert torch.equal(extension.linear(x, weight), want)


@needs_proc
def test_a_thread_with_threads_of_its_own_computes_the_same_and_leaves_none_behind():
    weight, x = PackedWeight.pack(torch.randn(200, 64), "int8"), torch.randn(9, 64)
    extension.set_num_threads(2)
    want, before, kept = extension.linear(x, weight), num_os_threads(), extension.kept_bytes()
    seen = []

    def compute():
        extension.use_own_threads(4)
        seen.append((extension.num_threads(), torch.equal(extension.linear(x, weight), want)))
        extension.set_num_threads(3)
        seen.append((extension.num_threads(), torch.equal(extension.linear(x, weight), want)))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [(4, True), (3, True)]
    while num_os_threads() > before:  # it ends a moment after it is joined
        time.sleep(0.001)
    assert (extension.num_threads(), extension.kept_bytes()) == (2, kept)
    with pytest.raises(ValueError, match="at least 1 can"):
        extension.use_own_threads(0)


def test_a_fork_of_a_thread_with_threads_of_its_own_computes_on_in_the_child(tmp_path):
    run_forked(
        """
        def work():
            extension.use_own_threads(3)
            extension.linear(x, weight)
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(extension.linear(x, weight), want) else 1)
            status.append(os.waitpid(child, 0)[1])
        status = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert status == [0] and torch.equal(extension.linear(x, weight), want)
        """,
        tmp_path,
    )


@needs_proc
def test_threads_begin_and_end_with_their_number():
    extension.set_num_threads(1)
    before = num_os_threads()
    extension.set_num_threads(6)
    assert num_os_threads() == before + 5
    extension.set_num_threads(1)
    assert num_os_threads() == before


@needs_proc
def test_idle_threads_sleep():
    others = {task.name for task in Path("/proc/self/task").iterdir()}
    extension.set_num_threads(4)
    weight, x = PackedWeight.pack(torch.randn(200, 64), "float32"), torch.randn(9, 64)
    extension.linear(x, weight)
    pool = [task for task in Path("/proc/self/task").iterdir() if task.name not in others]
    assert len(pool) == 3
    while {_state(task) for task in pool} != {"S"}:  # for ever if one spins: the test's time limit ends it
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def test_many_tiny_jobs_at_changing_numbers_of_threads():
    weight, x = PackedWeight.pack(torch.randn(40, 33), "int4"), torch.randn(3, 33)
    want = extension.linear(x, weight)
    for count in (1, 2, 3, 8, 2, 5, 1, 2):
        extension.set_num_threads(count)
        for _ in range(20):
            assert torch.equal(extension.linear(x, weight), want)


@pytest.mark.slow
def test_thousands_of_tiny_jobs_at_changing_numbers_of_threads():
    weight, x = PackedWeight.pack(torch.randn(40, 33), "int4"), torch.randn(3, 33)
    want = extension.linear(x, weight)
    for turn in range(60):
        extension.set_num_threads(turn % 4 + 1)
        for _ in range(50):
            assert torch.equal(extension.linear(x, weight), want)
        if turn % 3 == 0:
            time.sleep(0.001)  # long enough for the workers to sleep


def test_callers_from_several_threads_take_turns():
    """Two compute different layers, one packs, one changes the number of threads; all at the same time."""
    source = torch.randn(40, 33)
    weights = [PackedWeight.pack(torch.randn(50, 33), name) for name in ("float32", "int8")]
    x = torch.randn(5, 33)
    wants = [extension.linear(x, weight) for weight in weights]
    wrong = []

    def compute(weight, want):
        wrong.extend(i for i in range(60) if not torch.equal(extension.linear(x, weight), want))

    def pack():
        wrong.extend(i for i in range(30) if not torch.equal(PackedWeight.pack(source, "float32").unpack(), source))

    def resize():
        for i in range(20):
            extension.set_num_threads(i % 3 + 1)

    threads = [threading.Thread(target=compute, args=pair) for pair in zip(weights, wants, strict=True)]
    threads += [threading.Thread(target=pack), threading.Thread(target=resize)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such mode")
def test_workers_treat_subnormal_numbers_as_the_caller_does():
    weight, x = PackedWeight.pack(torch.full((4000, 33), 1e-10), "float32"), torch.full((1, 33), 1e-30)
    extension.set_num_threads(3)
    extension.linear(x, weight)  # the workers are there before the mode changes
    assert (extension.linear(x, weight) > 0).all()
    torch.set_flush_denormal(True)
    try:
        flushed = [extension.linear(x, weight) for _ in range(20)]
    finally:
        torch.set_flush_denormal(False)
    assert not any(result.view(torch.int32).any() for result in flushed)
    assert (extension.linear(x, weight) > 0).all()


def test_torch_between_the_jobs_changes_nothing():
    weight, x = PackedWeight.pack(torch.randn(64, 64), "float32"), torch.randn(9, 64)
    want = extension.linear(extension.linear(x, weight).relu(), weight)
    for _ in range(50):
        assert torch.equal(extension.linear(extension.linear(x, weight).relu(), weight), want)


@pytest.mark.slow
def test_the_child_of_a_fork_computes_with_threads_of_its_own(tmp_path):
    run_forked(
        """
        child = os.fork()
        assert torch.equal(extension.linear(x, weight), want)
        if child == 0:
            assert extension.num_threads() == 3
            extension.set_num_threads(2)
            assert torch.equal(extension.linear(x, weight), want)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_fork_while_another_thread_computes(tmp_path):
    run_forked(
        """
        is_over = threading.Event()

        def compute():
            while not is_over.is_set():
                extension.linear(x, weight)

        thread = threading.Thread(target=compute)
        thread.start()
        for _ in range(30):
            child = os.fork()
            if child == 0:
                os._exit(7 if torch.equal(extension.linear(x, weight), want) else 8)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        is_over.set()
        thread.join()
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_the_program_may_end_while_a_thread_computes():
    script = """
        import time
        # By the extension alone: torch's own functions end the program if they run while it ends.
        fields = dict(x=x.data_ptr(), num_rows=9, x_stride=64, bias=0, residual=0, out=want.data_ptr())
        fields |= dict(norm=0, eps=0.0, subtracts_mean=False, norm_bias=0)
        def compute():
            while True:
                extension._cpu.linear(weight=weight.handle, **fields)

        threading.Thread(target=compute, daemon=True).start()
        time.sleep(0.05)
    """
    command = [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@needs_proc
@pytest.mark.slow
def test_more_threads_than_the_system_gives_leave_one(tmp_path):
    run_forked(
        """
        import resource
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**28, resource.RLIM_INFINITY))
        try:
            extension.set_num_threads(1000)
        except RuntimeError:
            assert extension.num_threads() == 1
        else:
            raise AssertionError("1000 stacks fit into 256 MiB")
        assert torch.equal(extension.linear(x, weight), want)
        extension.set_num_threads(2)
        assert torch.equal(extension.linear(x, weight), want)
        """,
        tmp_path,
    )
