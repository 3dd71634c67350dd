"""Every kernel compiles for each GPU without spills, within shared memory, with tensor cores where it has products."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked_commands import forked_commands
from tests.marks import thorough_unless

HERE = Path(__file__).parent
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # of one program, by compute capability
MOST_STACK_BYTES = 64  # of a program: versions of Triton spill a few registers more, and large sines take an array
MODULES = sorted(path.stem for path in HERE.glob("cases_*.py"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    environment = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    with forked_commands(tmp_path_factory.mktemp("printed"), ["torch", "triton"], **environment) as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("module", thorough_unless(lambda it: it != "cases_other_formats", MODULES))
def test_kernels_compile_well_for_every_gpu(
    module: str, run: Callable[..., str], request: pytest.FixtureRequest
) -> None:
    which = "all" if request.config.getoption("--thorough") else "few"
    names = "tests.kernels.triton.ahead_of_time", f"tests.kernels.triton.{module}"
    for found in json.loads(run("-m", *names, which)):
        assert found["stack_bytes"] <= MOST_STACK_BYTES, found
        assert found["shared_bytes"] <= SHARED_BYTES[found["capability"]], found
        if found["has_dot"] and found["capability"] >= 80:
            assert found["num_products"] > 0, found
        if found["has_wide_loads"]:
            assert found["num_wide_loads"] > 0, found
