"""Compiles Triton kernels for GPUs that are not there, and reads registers, stacks and instructions from the result.

Runs in a process of its own without Triton's interpreter.
`python -m tests.kernels.triton.ahead_of_time MODULE few|all` prints the figures of each case as JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MOST_DIFFERENT = (75, 90)  # the oldest and the newest
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# PTX shows both as the GPU runs them: the assembler neither joins loads nor takes products apart.
WIDE_LOAD = re.compile(r"\bld\.global\S*\.(?:v4\.b32|v2\.b64)|\bcp\.async\.c[ag]\.\S+ [^;]*, (?:0x10|16)\b")
PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)")


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

    @property
    def few(self) -> tuple[int, ...]:
        """The oldest GPU, or the newest where tensor cores are wanted. Empty for a case of others."""
        found = tuple(it for it in self.capabilities if it in MOST_DIFFERENT)
        return found[-1:] if self.has_dot else found[:1]


@dataclass(frozen=True)
class Compiled:
    """Figures of one kernel for one compute capability."""

    name: str
    capability: int
    has_dot: bool
    has_wide_loads: bool
    num_registers: int
    stack_bytes: int  # with spilled registers
    shared_bytes: int
    num_wide_loads: int
    num_products: int  # of tensor cores


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for a compute capability and return the figures."""
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    return _figures(case, compiled, capability)


def _figures(case: Case, compiled: Any, capability: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    ptx = compiled.asm["ptx"]
    return Compiled(
        name=case.name,
        capability=capability,
        has_dot=case.has_dot,
        has_wide_loads=case.has_wide_loads,
        num_registers=int(found[0]),
        stack_bytes=int(found[1]),
        shared_bytes=compiled.metadata.shared,
        num_wide_loads=len(WIDE_LOAD.findall(ptx)),
        num_products=len(PRODUCT.findall(ptx)),
    )


def main(module: str, which: str) -> None:
    """Print the figures of every case in a module's `CASES`, for few or all of its compute capabilities."""
    cases: list[Case] = importlib.import_module(module).CASES
    found = [compile_case(case, it) for case in cases for it in (case.few if which == "few" else case.capabilities)]
    print(json.dumps([asdict(it) for it in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
