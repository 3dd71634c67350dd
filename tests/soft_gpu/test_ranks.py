"""Two ranks with a GPU in software each give the tokens of one, and add up twice a layer."""

from __future__ import annotations

import pytest

from tests.soft_gpu.test_families import NUM_LAYERS, printed_by

pytest.importorskip("triton", reason="Triton has no wheel for this machine")


@pytest.mark.slow
@pytest.mark.parametrize(
    "families",
    [("mixtral",), pytest.param(("gpt_oss", "olmoe", "qwen2_moe", "llama"), marks=pytest.mark.thorough)],
    ids="-".join,
)
def test_two_devices_give_the_tokens_of_one(families):
    found = printed_by("run_ranks", families)
    assert set(found) == set(families)
    for family, layouts in found.items():
        for layout, counts in layouts.items():
            where = f"{family}, {layout}: {counts}"
            assert counts["is_equal"], where
            assert (counts["num_cached"] > 0) == ("/" in layout), where  # pipelines share no prefixes
    if families == ("mixtral",):
        of_layers = {layout: sums_of(counts) for layout, counts in found["mixtral"].items()}
        assert of_layers.pop("cgopipe") > 2 * NUM_LAYERS  # of each micro-batch
        assert of_layers == {"sliced/tensor": 2 * NUM_LAYERS + 1, "expert/replicated": NUM_LAYERS}  # logits: one more


def sums_of(counts) -> int:
    """Return how often the ranks have added up in a decode pass: each time gloo takes a tensor to main memory."""
    lines = counts["synchronizations"].items()
    return sum(number for line, number in lines if "parallel/device_group.py" in line)
