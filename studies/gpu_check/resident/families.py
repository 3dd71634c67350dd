"""Compares tokens of tiny models of families on the GPU with the processor's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

from moeflow.engine import decode_graphs
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import is_rehearsal
from studies.gpu_check.resident.parallel import in_parallel
from studies.gpu_check.resident.target import Target
from studies.small_families import FAMILIES, Answers, equal_share, greedy_answers, small_config, write_small

PROMPT_LENS = (5, 1, 33)  # three sequences, so that captured passes of four are padded
NUM_TOKENS = 8
REHEARSED_TOKENS = 3


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note the share of equal tokens: eager and by CUDA graphs in float32, where all must be equal, and in bfloat16."""
    families = FAMILIES[:1] if is_rehearsal(options) else FAMILIES
    for family, shares in in_parallel(options, findings, _shares, families):
        findings.note(**{family: shares})
        figures = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        findings.row(family, figures, "equal tokens")
        if min(shares["float32 eager"], shares["float32 graphs"]) < 1.0:
            findings.fault(f"{family} gives other tokens than the processor: {shares}")


def _shares(options: argparse.Namespace, family: str) -> dict[str, float]:
    target, folder = Target(options), options.scratch / family
    write_small(family, folder)
    found = {}
    num_tokens = REHEARSED_TOKENS if target.is_rehearsal else NUM_TOKENS
    for dtype, has_graphs in (("float32", False), ("float32", True), ("bfloat16", True)):
        expected = greedy_answers(small_config(folder, "cpu", dtype), PROMPT_LENS, num_tokens)
        got = _on_target(folder, target, dtype, has_graphs, num_tokens)
        name = f"{dtype} {'graphs' if has_graphs else 'eager'}"
        found[name] = round(equal_share(expected, got), 4)
    return found


def _on_target(folder: Path, target: Target, dtype: str, has_graphs: bool, num_tokens: int) -> Answers:
    more: dict[str, Any] = {} if has_graphs else {"return_value": False}
    can_capture = mock.patch.object(decode_graphs, "can_capture", wraps=decode_graphs.can_capture, **more)
    config = small_config(folder, target.engine_device, dtype, max_num_seqs=4)
    with target.models(), can_capture:
        return greedy_answers(config, PROMPT_LENS, num_tokens)
