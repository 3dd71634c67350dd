"""Whole models whose experts are on the GPU in software and on the CPU: the CPU's tokens, one wait a layer."""

from __future__ import annotations

import pytest

from tests.soft_gpu.test_families import NUM_LAYERS, of_layers, printed_by

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

TAKEN = (("gpt_oss", "deepseek_v3"),)
OTHERS = (("qwen3_moe",), ("mixtral", "gemma4_text"), ("qwen2_moe",))
GROUPS = [*TAKEN, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)]
NUM_DENSE = {"deepseek_v3": 1}  # layers
NUM_EXPERTS = 8
MOST_LAUNCHES = 14  # of a layer: the CPU's sum and the residual are added apart
MOST_OF_FAMILY = {"deepseek_v3": 13, "gemma4_text": 23}  # with a network for all tokens
MOVES = "packed_bands.py"  # changes the layout of experts that move


@pytest.mark.slow
@pytest.mark.parametrize("families", GROUPS)
def test_tokens_are_the_processors_wherever_experts_are(families: tuple[str, ...]) -> None:
    found = printed_by("run_hybrid", families)
    assert set(found) == set(families)
    for family, runs in found.items():
        num_layers = NUM_LAYERS - NUM_DENSE.get(family, 0)
        most = MOST_OF_FAMILY.get(family, MOST_LAUNCHES) * NUM_LAYERS
        for run, counts in runs.items():
            batch, num_slots = map(int, run.split(" x "))
            where = f"{family}, batch {batch}, {num_slots} slots: {counts}"
            is_shared = num_slots < NUM_EXPERTS
            has_moves = is_shared and num_slots > 0
            assert counts["is_equal"], where
            assert counts["synchronizations"].pop("flag", 0) == is_shared * num_layers, where
            assert sum(counts["synchronizations"].values()) == 1, where  # for the sampled tokens
            assert not counts["pageable_copies"], where
            launches = {line: number for line, number in counts["launches"].items() if MOVES not in line}
            assert of_layers(launches) <= most, where
            assert (counts["num_moves"] > 0) == has_moves, where
            assert (counts["num_streamed"] > 0) == (is_shared and batch > 1), where
            on_gpu, on_cpu = counts["pairs"]
            assert (on_gpu > 0) == has_moves, where
            assert (on_cpu > 0) == is_shared, where


@pytest.mark.slow
def test_experts_from_disk_give_the_same_tokens_while_they_move() -> None:
    found = printed_by("run_hybrid", ("disk",))
    assert set(found) == {"qwen2_moe", "gpt_oss", "planned"}
    assert found["planned"]["pipeline"] == "hybrid"
    for family, counts in found.items():
        where = f"{family}: {counts}"
        assert counts["is_equal"], where
        assert not counts["pageable_copies"], where
        assert counts["num_moves"] > 0, where
        assert (counts["num_streamed"] > 0) == (family == "qwen2_moe"), where
        assert all(counts["pairs"]), where
        hits, misses, num_there = counts["in_memory"]
        assert hits > 0, where
        assert misses > 0, where
        assert 0 < num_there <= (4 if family != "planned" else 8 * 12 // 2), where


@pytest.mark.slow
def test_integer_weights_give_the_tokens_of_a_gpu_that_has_all() -> None:
    found = printed_by("run_hybrid", ("integers",))
    assert found == {f"{name}, {number} slots": True for name in ("int8", "int4") for number in (0, 4, NUM_EXPERTS)}
