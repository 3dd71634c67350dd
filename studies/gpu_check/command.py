"""Runs the steps of a group one after another."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from studies.gpu_check.options import ALL, Step, is_rehearsal, parsed, steps_of
from studies.gpu_check.processes import in_process, run_step
from studies.gpu_check.report import Report

_LEAST_S: Final = 10.0  # a step takes as long to start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; return 0 if all succeeded, or if there is no GPU."""
    options = parsed(arguments)
    if options.step:
        return run_step(options)
    steps = steps_of(options)
    needs_cuda = any("cuda" in step.device(options) for step in steps)
    if needs_cuda and not torch.cuda.is_available():
        print("torch finds no CUDA device here. On a machine with one, this would run:")
        print("\n".join(f"  {_name(step, options)}" for step in steps))
        return 0
    report = Report(options)
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.scratch) as scratch:
        for step in steps:
            if report.left_s < _LEAST_S:
                outcome = {"seconds": 0.0, "error": "no time was left"}
            else:
                limit_s = report.left_s if is_rehearsal(options) else min(step.limit_s, report.left_s)
                outcome = in_process(step, options, Path(scratch), limit_s)
            report.add(_name(step, options), outcome)
    print(report.table())
    print(f"wrote {options.out}")
    return int(not report.is_good)


def _name(step: Step, options: argparse.Namespace) -> str:
    return f"{step.group}: {step.title}" if options.group == ALL else step.title
