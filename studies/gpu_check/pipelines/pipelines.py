"""Compares the pipelines on the benchmark's model."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Final

from moeflow.bench.records import Record
from moeflow.core.units import MIB, parse_bytes
from studies.gpu_check.findings import Findings
from studies.pipelines import SHARING

CGOPIPE: Final = "cgopipe"
# A claim compares the first ones.
ORDER: Final = (CGOPIPE, "flexgen-cpu-attention", "fastdecode", "flexgen", SHARING, "zero-inference")


def run(options: argparse.Namespace, findings: Findings, memory: str) -> None:
    """Run the comparison of pipelines on a GPU of so much memory; with a narrower model, on so much less."""
    narrow = int((options.scratch / "narrow").read_text())
    memory_bytes = parse_bytes(memory) // narrow**2
    sizes = ["--requests", str(options.requests), "--micro-batch", str(options.micro_batch), "--rounds", "1"]
    device = options.device.format(memory=f"{memory_bytes // MIB}MiB")
    code = "from studies import stand_ins; stand_ins.install(); import runpy; "
    code += "runpy.run_module('studies.pipelines', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, str(options.scratch / "model"), "--device", device, *sizes, "--json"]
    command += [word for name in ORDER for word in ("--pipeline", name)]
    records: list[Record] = []
    speeds: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # stderr is the step's
        assert process.stdout is not None
        for line in process.stdout:
            records.append(record := json.loads(line))
            speeds[record["pipeline"]] = speed = statistics.median(record["tokens_per_s"])
            idle = f"link idle {record['link_idle']:.0%}, device idle {record['device_idle']:.0%}"
            findings.note(device=device, narrow=narrow, records=records)
            findings.row(record["pipeline"], f"{speed:.1f} tokens/s", idle)
    others = [speed for name, speed in speeds.items() if name not in (CGOPIPE, SHARING)]
    if CGOPIPE in speeds and others:
        findings.row("cgopipe", f"{speeds[CGOPIPE] / max(others):.2f}", "times the best other")
    if process.returncode:
        findings.fault(f"the comparison ended with {process.returncode}")
