"""Compares tokens of every pipeline with those of the processor."""

from __future__ import annotations

import argparse

from moeflow.pipeline.catalog import OFFLOADING
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import is_rehearsal
from studies.gpu_check.pipelines.models import HEADS, answers, pipeline_on, shaped
from studies.small_families import equal_share, small_config

SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 512}
# Type, micro-batch, and the share of experts that stay.
CUTS = (("float32", 3, 0.4), ("bfloat16", 3, 0.4), ("float32", 1, 0.0), ("float32", 1000, 1.0))


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Compare the greedy tokens of every pipeline with the plain run's: equal in float32, mostly so in bfloat16."""
    folder = shaped(options.scratch / "small", SMALL | HEADS)
    found: dict[str, dict[str, list[float]]] = {}
    cuts = CUTS[:1] if is_rehearsal(options) else CUTS
    for dtype, micro_batch, share in cuts:
        plain = answers(small_config(folder, "cpu", dtype))
        of_dtype = found.setdefault(dtype, {})
        for name in OFFLOADING:
            with findings.of(f"{name}, {dtype}, micro-batch {micro_batch}"):
                got = answers(pipeline_on(options, folder, name, dtype, micro_batch, share))
                of_dtype.setdefault(name, []).append(round(equal_share(plain, got), 4))
                findings.note(equal_tokens=found)
    for dtype, of_dtype in found.items():
        least = min((share for shares in of_dtype.values() for share in shares), default=0.0)
        findings.row(f"all pipelines, {dtype}", f"{least:.1%}", "equal tokens, the least")
        if dtype == "float32" and least < 1.0:
            findings.fault(f"float32 gives other tokens than the plain run: {of_dtype}")
