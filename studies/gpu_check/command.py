"""Runs the steps of a group one after another."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from studies.gpu_check.options import STEPS, parsed, steps_of
from studies.gpu_check.processes import in_process, run_step
from studies.gpu_check.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; return 0 if all succeeded, or if there is no GPU."""
    options = parsed(arguments)
    if options.step:
        return run_step(options)
    steps = steps_of(options)
    if "cuda" in options.device and not torch.cuda.is_available():
        print("torch finds no CUDA device here. On a machine with one, this would run:")
        print("\n".join(f"  {step}" for step in steps))
        return 0
    report, limits_s = Report(options), STEPS[options.group]
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.scratch) as scratch:
        for number, step in enumerate(steps):
            limit_s = limits_s.get(step, report.left_s / (len(steps) - number))
            report.add(step, in_process(step, options, Path(scratch), min(limit_s, max(report.left_s, 1.0))))
    print(report.table())
    print(f"wrote {options.out}")
    return int(not report.is_good)
