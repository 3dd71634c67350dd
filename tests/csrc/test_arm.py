"""The kernels for ARM are right: compiled by a cross compiler and run in an emulator, as each kind of processor."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECK_ARM = Path(__file__).parents[2] / "scripts" / "check-arm"
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "cmake", "ninja")
UNITS = ("neon", "neon_dotprod", "neon_i8mm")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (scripts/check-arm says from where)")
@pytest.mark.parametrize(("kind", "units"), [("best", UNITS[-1:]), ("kernels", UNITS)])
def test_kernels_for_arm_are_right_in_an_emulator(kind, units):
    command, environment = [CHECK_ARM, kind], os.environ | {"JOBS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = done.stdout.splitlines()
    assert [unit for unit in UNITS if f"{unit}: right" in said] == list(units)
    assert [line for line in said if line.startswith("best here")] == [f"best here: {unit}" for unit in units]
    assert {"shared group: right", "slab reader: right"} <= set(said)
