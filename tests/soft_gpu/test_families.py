"""Whole models of every family on the GPU in software: the processor's tokens, few launches, no waiting in a layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

ROOT = Path(__file__).parents[2]
GROUPS = (
    ("qwen3_moe", "mixtral", "gpt_oss", "llama"),
    ("olmoe", "qwen2_moe", "qwen3", "gemma3_text"),
    ("glm4_moe", "ernie4_5_moe", "dots1", "granitemoe"),
    ("minimax_m2", "phimoe", "hunyuan_v1_moe", "granitemoeshared"),
    ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4_text"),
    ("lfm2_moe", "qwen3_next", "granitemoehybrid", "qwen3_5_moe_text"),
)
OUTSIDE_LAYERS = 14  # embedding, rotary tables, the last norm, logits and sampling
NUM_LAYERS = 2
MOST_LAUNCHES = 12  # of a layer
# Shared experts, latent attention, recurrent mixers and norms of results are parts that other layers do not have.
MOST_OF_FAMILY = {
    "qwen2_moe": 19,
    "hunyuan_v1_moe": 16,
    "granitemoeshared": 16,
    "glm4_moe": 14,
    "ernie4_5_moe": 14,
    "dots1": 14,
    "deepseek_v2": 16,
    "deepseek_v3": 16,
    "glm4_moe_lite": 19,
    "gemma3_text": 14,
    "gemma4_text": 25,
    "granitemoehybrid": 16,
    "qwen3_next": 21,
    "qwen3_5_moe_text": 21,
    "granitemoe": 14,
    "phimoe": 14,
    "minimax_m2": 13,
}


@pytest.mark.slow
@pytest.mark.parametrize("families", GROUPS, ids="-".join)
def test_tokens_are_the_processors_and_no_layer_waits(families: tuple[str, ...]) -> None:
    found = _printed_by("run_families", families)
    assert set(found) == set(families)
    for family, batches in found.items():
        most = MOST_OF_FAMILY.get(family, MOST_LAUNCHES) * NUM_LAYERS + OUTSIDE_LAYERS
        for batch, counts in batches.items():
            where = f"{family}, batch {batch}: {counts}"
            assert counts["is_equal"], where
            assert (counts["num_cached"] > 0) == (batch != "1"), where  # prompts that repeat earlier ones
            assert sum(counts["launches"].values()) <= most, where
            assert sum(counts["synchronizations"].values()) == 1, where  # for the sampled tokens
            assert not counts["pageable_copies"], where
            assert not counts["loading"]["pageable_copies"], where
            assert not counts["loading"]["synchronizations"], where


@pytest.mark.slow
def test_integer_weights_run_with_and_without_graphs() -> None:
    families = ("qwen3_moe", "gpt_oss")
    found = _printed_by("run_quantized", families)
    assert set(found) == set(families)
    for formats in found.values():
        assert formats == {
            name: {"format": name, "head": "int8", "is_equal": True, "pageable_copies": {}} for name in ("int8", "int4")
        }


def _printed_by(module: str, families: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.soft_gpu.{module}", *families]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
