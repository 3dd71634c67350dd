"""Compares every Triton kernel with torch in float64, on fresh inputs, with outputs poisoned before."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.accuracy import DTYPES, Accuracy
from studies.gpu_check.resident.attention_checks import check_attention, check_attention_inputs, check_latent_attention
from studies.gpu_check.resident.parallel import in_parallel
from studies.gpu_check.resident.recurrent_checks import check_recurrences
from studies.gpu_check.resident.row_checks import check_rows
from studies.gpu_check.resident.sampling_checks import check_sampling
from studies.gpu_check.resident.target import Target
from studies.gpu_check.resident.weight_checks import check_blocks, check_experts, check_quantized

_CHECKS = {
    check.__name__: check
    for check in (
        check_experts,
        check_attention,
        check_attention_inputs,
        check_rows,
        check_quantized,
        check_blocks,
        check_latent_attention,
        check_recurrences,
        check_sampling,
    )
}


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note each kernel's largest relative error in each dtype; an error beyond the limits fails the step."""
    parts = list(itertools.product(_CHECKS, DTYPES))
    for _, (errors, faults) in in_parallel(options, findings, _check, parts):
        for fault in faults:
            findings.fault(fault)
        for kernel, of_kernel in errors.items():
            findings.note(**{kernel: findings.result.get(kernel, {}) | of_kernel})
    for kernel, of_kernel in findings.result.items():
        figures = ", ".join(f"{dtype} {error:.1e}" for dtype, error in sorted(of_kernel.items()))
        findings.row(kernel, figures, "relative error")


def _check(options: argparse.Namespace, part: tuple[str, torch.dtype]) -> tuple[dict[str, Any], list[str]]:
    name, dtype = part
    findings, target = Findings(None), Target(options)
    seed = 0 if target.is_rehearsal else torch.seed() % 2**31  # a rehearsal fails for faults, not for rare inputs
    with torch.inference_mode():
        _CHECKS[name](Accuracy(target, findings, dtype, seed))
    return findings.result, findings.faults
