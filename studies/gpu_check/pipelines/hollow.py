"""Writes the benchmark's model, as wide as main memory allows."""

from __future__ import annotations

import argparse
from pathlib import Path

from moeflow.core.units import GIB
from moeflow.models.registry import read_bare_config
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.model_files import shipped_models
from studies.gpu_check.findings import Findings
from studies.hollow_model import write_hollow_mixtral

NARROW = (2, 4, 8, 16)  # a half of the widths, and a quarter of the GPU's memory, take a quarter of the time
ROOM = 1.3  # main memory, as a multiple of the weights: two layers are staged, and there are keys and values


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Write the benchmark's model, as wide as main memory allows."""
    config_file = shipped_models().get(options.shape) or Path(options.shape)
    weights = 2 * read_bare_config(config_file).num_parameters
    available = host_resources().available_bytes
    fitting = [narrow for narrow in NARROW if ROOM * weights / narrow**2 <= available]
    if not fitting:
        raise MemoryError(f"{options.shape} does not fit into main memory, however narrow")
    write_hollow_mixtral(config_file, options.scratch / "model", fitting[0])
    (options.scratch / "narrow").write_text(str(fitting[0]))
    findings.note(narrow=fitting[0], weights_gib=round(weights / fitting[0] ** 2 / GIB, 1))
