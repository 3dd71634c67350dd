"""Measures the GPU and its link."""

from __future__ import annotations

import argparse

import torch

from moeflow.core.units import MIB
from moeflow.planner.hardware.calibrate_device import measure_device
from studies.gpu_check.findings import Findings


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Measure device and link."""
    is_gpu = "cuda" in options.device
    sizes = {} if is_gpu else {"buffer_bytes": 4 * MIB, "matrix_size": 64}
    level, there, back = measure_device(torch.device("cuda" if is_gpu else "cpu"), 1, **sizes)
    assert level.processor is not None
    findings.note(
        read_gb_per_s=round(level.read_bytes_per_s / 1e9, 1),
        tflops={dtype: round(peak / 1e12, 2) for dtype, peak in level.processor.peak_flops_per_s},
        to_device_gb_per_s={rate.transfer_bytes: round(rate.bytes_per_s / 1e9, 2) for rate in there.rates},
        to_host_gb_per_s={rate.transfer_bytes: round(rate.bytes_per_s / 1e9, 2) for rate in back.rates},
    )
