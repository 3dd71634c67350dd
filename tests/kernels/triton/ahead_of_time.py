"""Compiles Triton kernels for GPUs that are not there, and reads registers, spills and instructions from the result.

Runs in a process of its own without Triton's interpreter.
`python -m tests.kernels.triton.ahead_of_time MODULE CAPABILITY...` prints the figures of each case as JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTIONS = ("HGMMA", "HMMA", "LDGSTS", "LDG", "FFMA")


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments and its constants."""

    name: str
    kernel: Any
    signature: dict[str, str]  # of arguments that are no constants, in order: "*bf16", "i32", ...
    constants: dict[str, Any]
    aligned: tuple[str, ...]  # pointers and numbers that are multiples of 16
    options: dict[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    has_dot: bool = False  # tensor cores are wanted from sm_80 on
    has_wide_loads: bool = True  # 128 bits at a time
    capabilities: tuple[int, ...] = (75, 80, 89, 90)


@dataclass(frozen=True)
class Compiled:
    """Figures of one kernel for one compute capability."""

    name: str
    capability: int
    has_dot: bool
    has_wide_loads: bool
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    num_wide_loads: int
    instructions: dict[str, int]


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for a compute capability and return the figures."""
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    return _figures(case, compiled, capability)


def _figures(case: Case, compiled: Any, capability: int) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        found = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        assert found is not None
        assembler = TOOLS / ("ptxas-blackwell" if capability >= 90 else "ptxas")
        report = _run(assembler, "-v", f"-arch={found[1]}", str(ptx), "-o", "/dev/null").stderr
        sass = _run(TOOLS / "cuobjdump", "--dump-sass", str(cubin)).stdout
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.findall(r"Used (\d+) registers", report)
    assert registers, report
    return Compiled(
        name=case.name,
        capability=capability,
        has_dot=case.has_dot,
        has_wide_loads=case.has_wide_loads,
        num_registers=max(map(int, registers)),
        spill_bytes=sum(int(number) for pair in spills for number in pair),
        shared_bytes=compiled.metadata.shared,
        num_wide_loads=len(re.findall(r"LDG(?:STS)?\S*\.128", sass)),
        instructions={name: len(re.findall(rf"\b{name}\b", sass)) for name in INSTRUCTIONS},
    )


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


def main(module: str, capabilities: Sequence[int]) -> None:
    """Print the figures of every case in a module's `CASES` for some compute capabilities."""
    cases: list[Case] = importlib.import_module(module).CASES
    found = [compile_case(case, it) for case in cases for it in case.capabilities if it in capabilities]
    print(json.dumps([asdict(it) for it in found]))


if __name__ == "__main__":
    main(sys.argv[1], [int(capability) for capability in sys.argv[2:]])
