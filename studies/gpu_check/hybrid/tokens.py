"""Compares tokens of tiny models, some of whose experts are on the GPU, with the processor's."""

from __future__ import annotations

import argparse
from typing import Final

from studies.gpu_check.findings import Findings
from studies.gpu_check.hybrid.configs import hybrid
from studies.gpu_check.options import is_rehearsal
from studies.gpu_check.resident.parallel import in_parallel
from studies.gpu_check.resident.target import Target
from studies.small_families import equal_share, greedy_answers, small_config, write_small

FAMILIES: Final = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma4_text")
PROMPT_LENS: Final = (5, 1, 60)
SLOTS: Final = (0, 4)  # of eight experts
_STREAM_TOKENS: Final = 40  # the longest prompt streams


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note the share of equal tokens. In float32 all must be equal."""
    families = FAMILIES[:1] if is_rehearsal(options) else FAMILIES
    for family, shares in in_parallel(options, findings, _shares, families):
        findings.note(**{family: shares})
        figures = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        findings.row(family, figures, "equal tokens")
        if any(share < 1.0 for name, share in shares.items() if name.startswith("float32")):
            findings.fault(f"{family} gives other tokens than the processor: {shares}")


def _shares(options: argparse.Namespace, family: str) -> dict[str, float]:
    target, folder = Target(options), options.scratch / family
    write_small(family, folder)
    num_tokens = 3 if target.is_rehearsal else 8
    found = {}
    for dtype in ("float32", "bfloat16"):
        expected = greedy_answers(small_config(folder, "cpu", dtype), PROMPT_LENS, num_tokens)
        config = small_config(folder, target.engine_device, dtype, max_num_seqs=4)
        for num_slots in SLOTS:
            with target.models():
                got = greedy_answers(hybrid(config, num_slots, _STREAM_TOKENS), PROMPT_LENS, num_tokens)
            found[f"{dtype}, {num_slots} on the GPU"] = round(equal_share(expected, got), 4)
    return found
