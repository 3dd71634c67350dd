"""Compares tokens of every pipeline with those of the processor."""

from __future__ import annotations

import argparse

from moeflow.pipeline.catalog import OFFLOADING
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import is_rehearsal
from studies.gpu_check.pipelines.models import HEADS, answers, pipeline_on, shaped
from studies.small_families import equal_share, small_config

SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 512}
CUTS = ((3, 0.4), (1, 0.0), (1000, 1.0))  # micro-batches, and the share of experts that stay


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Compare the greedy tokens of every pipeline with the plain run's: equal in float32, mostly so in bfloat16."""
    folder = shaped(options.scratch / "small", SMALL | HEADS)
    shares: dict[str, dict[str, list[float]]] = {}
    dtypes, cuts = (("float32",), CUTS[:1]) if is_rehearsal(options) else (("float32", "bfloat16"), CUTS)
    for dtype in dtypes:
        plain = answers(small_config(folder, "cpu", dtype))
        for name in OFFLOADING:
            found = [answers(pipeline_on(options, folder, name, dtype, *cut)) for cut in cuts]
            shares.setdefault(dtype, {})[name] = [round(equal_share(plain, each), 4) for each in found]
            findings.note(equal_tokens=shares)
    if min(share for each in shares["float32"].values() for share in each) < 1.0:
        findings.fault(f"float32 gives other tokens than the plain run: {shares['float32']}")
