import pytest

from moeflow.kernels.cpu import extension

CAPS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


@pytest.fixture
def needs_kernels():
    """For tests of the CPU extension: at two threads, whatever ran before."""
    if not extension.is_available():
        pytest.skip(extension.why_not())
    extension.set_num_threads(2)


@pytest.fixture(scope="module", params=CAPS)
def isa(request):
    """Each instruction set in turn: all tests of a module that ask for it run under one cap, then under the next.

    At one thread: where other programs want the cores, a second one is waited for at every step of every call. What
    depends on threads says so.
    """
    if not extension.is_available():
        pytest.skip(extension.why_not())
    extension.set_num_threads(1)
    extension.use_isa(request.param)
    if extension.isa_name() != request.param:
        extension.use_isa("")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    extension.use_isa("")


@pytest.fixture
def some_threads():
    """For tests that need more than one thread, or set how many."""
    extension.set_num_threads(2)
    yield
    extension.set_num_threads(1)
