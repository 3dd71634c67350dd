"""Every kernel compiles for each GPU without spills, within shared memory, with tensor cores where it has products."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # of one program, by compute capability
MOST_SPILL_BYTES = 64  # of a program: versions of Triton differ by a few registers
MOST_DIFFERENT = (75, 90)  # the oldest and the newest; others are for thorough runs
MODULES = sorted(path.stem for path in HERE.glob("cases_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_well_for_every_gpu(module: str, request: pytest.FixtureRequest) -> None:
    capabilities = tuple(SHARED_BYTES) if request.config.getoption("--thorough") else MOST_DIFFERENT
    for found in _figures(f"tests.kernels.triton.{module}", capabilities):
        assert found["spill_bytes"] <= MOST_SPILL_BYTES, found
        assert found["shared_bytes"] <= SHARED_BYTES[found["capability"]], found
        if found["has_dot"] and found["capability"] >= 80:
            assert found["instructions"]["HMMA"] + found["instructions"]["HGMMA"] > 0, found
        if found["has_wide_loads"]:
            assert found["num_wide_loads"] > 0, found


def _figures(module: str, capabilities: tuple[int, ...]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.kernels.triton.ahead_of_time", module, *map(str, capabilities)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
