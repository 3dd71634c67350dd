"""Whole models of every family on the GPU in software: the processor's tokens, few launches, no waiting in a layer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeflow.pipeline.catalog import OFFLOADING
from tests.forked_commands import lasting_commands

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

TAKEN = (
    ("qwen3_moe", "gpt_oss", "llama"),
    ("deepseek_v3", "glm4_moe_lite", "gemma4"),  # of the multimodal gemma4 only the text model is loaded
    ("lfm2_moe", "qwen3_next", "granitemoehybrid"),
)
OTHERS = (  # which repeat these layers
    ("mixtral", "olmoe", "qwen2_moe", "qwen3"),
    ("gemma3_text", "gemma4_text", "glm4_moe", "ernie4_5_moe"),
    ("dots1", "granitemoe", "granitemoeshared", "minimax_m2"),
    ("phimoe", "hunyuan_v1_moe", "deepseek_v2", "qwen3_5_moe_text"),
)
GROUPS = [*TAKEN, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)]
NUM_LAYERS = 2
OUTSIDE_LAYERS = (
    "kernels/embedding.py",
    "kernels/scaling.py",
    "rotary_table",
    "device_sample.py",
    "greedy_kernel",
    "decode_graphs.py",
)
OTHER_STEPS = 2  # the norm before all layers, and the product of logits
MOST_LAUNCHES = 11  # of a layer
MOST_OF_FAMILY = {
    # Latent attention: a product with the projection of values stands between attention and the output product.
    "deepseek_v2": 12,
    "deepseek_v3": 12,
    # The same, and queries take two products one after another.
    "glm4_moe_lite": 13,
    # Dense layers have no router, choice and second sum.
    "llama": 10,
    "qwen3": 10,
    "gemma3_text": 10,
}

WITH_STATES = ("qwen3_next", "granitemoehybrid", "qwen3_5_moe_text")  # of each head, whose prompts are cut into chunks


@pytest.mark.slow
@pytest.mark.parametrize("families", GROUPS, ids="-".join)
def test_tokens_are_the_processors_and_no_layer_waits(families: tuple[str, ...]) -> None:
    found = printed_by("run_families", families)
    assert set(found) == set(families)
    for family, batches in found.items():
        most = MOST_OF_FAMILY.get(family, MOST_LAUNCHES) * NUM_LAYERS
        for batch, counts in batches.items():
            where = f"{family}, batch {batch}: {counts}"
            assert counts["is_equal"], where
            assert (counts["num_cached"] > 0) == (batch != "1"), where  # prompts that repeat earlier ones
            assert (counts["num_chunked"] > 0) == (batch != "1" and family in WITH_STATES), where  # of long prompts
            assert of_layers(counts["launches"]) <= most, where
            assert sum(counts["synchronizations"].values()) == 1, where  # for the sampled tokens
            assert not counts["pageable_copies"], where
            assert not counts["loading"]["pageable_copies"], where
            assert not counts["loading"]["synchronizations"], where


@pytest.mark.slow
def test_pipelines_give_the_same_tokens_and_nothing_waits_within_a_pass() -> None:
    """Of copies to the host only those count here that a pass begins and ends with."""
    found = printed_by("run_offloaded", tuple(OFFLOADING))
    assert set(found) == set(OFFLOADING)
    for pipeline, counts in found.items():
        where = f"{pipeline}: {counts}"
        assert counts["is_equal"], where
        launched = {line for line in counts["synchronizations"] if "devices/cuda_device.py" in line}
        (at_end,) = set(counts["synchronizations"]) - launched
        assert "engine/offload/offloaded_model.py" in at_end, where
        assert not counts["pageable_copies"], where


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_integer_weights_run_with_and_without_graphs(family: str) -> None:
    formats = {
        name: {"format": name, "head": "int8", "is_equal": True, "pageable_copies": {}} for name in ("int8", "int4")
    }
    assert printed_by("run_quantized", (family,)) == {family: formats}


def of_layers(launches: dict[str, int]) -> int:
    """Return how many kernels all layers start together."""
    started = (count for place, count in launches.items() if not any(name in place for name in OUTSIDE_LAYERS))
    return sum(started) - OTHER_STEPS


def printed_by(module: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return what a module of this folder prints for its arguments, in a process of its own."""
    run = lasting_commands("tests.soft_gpu.run_families", "studies.random_family")
    found: dict[str, Any] = json.loads(run("-m", f"tests.soft_gpu.{module}", *arguments).splitlines()[-1])
    return found
