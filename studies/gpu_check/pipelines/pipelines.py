"""Compares the pipelines on the benchmark's model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from moeflow.core.units import MIB, parse_bytes
from studies.gpu_check.findings import Findings


def run(options: argparse.Namespace, findings: Findings, memory: str) -> None:
    """Run the comparison of pipelines on a GPU of so much memory; with a narrower model, on so much less."""
    narrow = int((options.scratch / "narrow").read_text())
    memory_bytes = parse_bytes(memory) // narrow**2
    sizes = ["--requests", str(options.requests), "--micro-batch", str(options.micro_batch), "--rounds", "1"]
    device = options.device.format(memory=f"{memory_bytes // MIB}MiB")
    code = "from studies import stand_ins; stand_ins.install(); import runpy; "
    code += "runpy.run_module('studies.pipelines', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, str(options.scratch / "model"), "--device", device, *sizes]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)  # stderr is the step's
    findings.note(device=device, narrow=narrow, records=[json.loads(line) for line in done.stdout.splitlines()])
