"""Compares every Triton kernel with torch in float64, on fresh inputs, with outputs poisoned before."""

from __future__ import annotations

import argparse

import torch

from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.accuracy import DTYPES, Accuracy, seeds
from studies.gpu_check.resident.attention_checks import check_attention, check_attention_inputs, check_latent_attention
from studies.gpu_check.resident.row_checks import check_rows
from studies.gpu_check.resident.target import Target
from studies.gpu_check.resident.weight_checks import check_experts, check_quantized

_CHECKS = (check_rows, check_attention, check_attention_inputs, check_latent_attention, check_experts, check_quantized)


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note each kernel's largest relative error in each dtype; an error beyond the limits fails the step."""
    target, seed = Target(options), seeds()
    with torch.inference_mode():
        for check in _CHECKS:
            for dtype in DTYPES:
                try:
                    check(Accuracy(target, findings, dtype, next(seed)))
                except Exception as error:  # the other kernels are checked nonetheless
                    findings.fault(f"{check.__name__}, {dtype}: {type(error).__name__}: {error}"[:500])
    for kernel, errors in findings.result.items():
        findings.row(kernel, ", ".join(f"{dtype} {error:.1e}" for dtype, error in errors.items()), "relative error")
