import pytest

from moeflow.kernels.cpu import extension

INSTRUCTION_SETS = extension.ISAS or ("none",)  # of none, tests are skipped


def pytest_generate_tests(metafunc):
    """Run tests that depend on the instruction set under two sets of this processor, or under all of them."""
    if "isa" in metafunc.fixturenames:
        chosen = INSTRUCTION_SETS if metafunc.config.getoption("--thorough") else two_instruction_sets()
        metafunc.parametrize("isa", chosen, indirect=True, scope="module")


def two_instruction_sets():
    """Return the best one, and one that differs from it in all: AVX2, or the simplest where there is no better one."""
    if not extension.is_available():
        return INSTRUCTION_SETS[:1]
    simplest, best = INSTRUCTION_SETS[0], extension.best_isa("")
    other = "avx2" if best.startswith(("avx512", "amx")) else simplest
    return (other, best) if best != other else (best,)


@pytest.fixture
def needs_kernels():
    """For tests of the CPU extension: at two threads, whatever ran before."""
    if not extension.is_available():
        pytest.skip(extension.why_not())
    extension.set_num_threads(2)


@pytest.fixture(scope="module")
def isa(request):
    """Each instruction set: all tests of a module that use this fixture run under one cap, then under the next.

    At one thread: where other programs want the cores, a second one is waited for at every step of every call. Tests
    that depend on threads set their number.
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
