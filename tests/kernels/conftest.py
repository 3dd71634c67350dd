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
    """Each instruction set in turn: all tests of a module that ask for it run under one cap, then under the next."""
    if not cpu.is_available():
        pytest.skip(cpu.why_not())
    cpu.set_num_threads(2)
    cpu.use_isa(request.param)
    if cpu.isa_name() != request.param:
        cpu.use_isa("")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.use_isa("")
