"""Runs steps: each in a process of its own, with a time limit."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from studies.gpu_check.findings import Findings
from studies.gpu_check.options import PIPELINES, Step, is_rehearsal

_OUTCOME = "outcome.json"


def in_process(step: Step, options: argparse.Namespace, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run a step in a separate process, and return its output or its failure."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "studies.gpu_check", step.group, "--step", step.title]
    command += ["--scratch", str(scratch), "--device", step.device(options)]
    for name in ("shape", "middle", "requests", "micro_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    log = scratch / "log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(limit_s)
            error = None if process.returncode == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"was not done after {limit_s:.0f} s"
    outcome: dict[str, Any] = {"seconds": round(time.monotonic() - began_s, 1)}
    file = scratch / _OUTCOME
    if file.exists():
        outcome |= json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    if error is not None:
        error = "; ".join([error, *outcome.get("faults", ())])
        outcome |= {"error": error, "log": log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]}
    return outcome


class _AsFaults(logging.Handler):
    """Takes warnings, as those of graphs that cannot be captured, for faults of a step."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._findings.fault(record.getMessage())


def run_step(options: argparse.Namespace) -> int:
    """Run one step in this process, and write its findings; return 1 if it fails."""
    name, _, memory = options.step.partition(" ")
    findings = Findings(options.scratch / _OUTCOME)
    logging.getLogger("moeflow.engine.decode_graphs").addHandler(_AsFaults(findings))
    try:
        if is_rehearsal(options):
            importlib.import_module("studies.gpu_check.rehearsal").prepare(options.group, name)
        module = importlib.import_module(f"studies.gpu_check.{options.group}.{name}")
        module.run(options, findings, *([memory] if name == PIPELINES else []))
    except Exception:
        traceback.print_exc()
        return 1
    for fault in findings.faults:
        print(fault, file=sys.stderr)
    return int(bool(findings.faults))
