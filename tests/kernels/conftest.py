import pytest

from moeflow.kernels import cpu

CAPS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


@pytest.fixture
def needs_kernels():
    """For tests of the CPU extension: at two threads, whatever ran before."""
    if not cpu.is_available():
        pytest.skip(cpu.why_not())
    cpu.set_num_threads(2)


@pytest.fixture(scope="module", params=CAPS)
def isa(request):
    """Each instruction set in turn: all tests of a module that ask for it run under one cap, then under the next.

    At one thread: where other programs want the cores, a second one is waited for at every step of every call. What
    depends on threads says so.
    """
    if not cpu.is_available():
        pytest.skip(cpu.why_not())
    cpu.set_num_threads(1)
    cpu.use_isa(request.param)
    if cpu.isa_name() != request.param:
        cpu.use_isa("")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.use_isa("")


@pytest.fixture
def some_threads():
    """For tests that need more than one thread, or set how many."""
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(1)
