"""`--quantize` on a GPU refuses exactly the models whose matrices the GPU's formats cannot hold."""

from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.registry import find_family, read_model_config
from moeflow.planner.choices.gpu_limits import gpu_refusal
from moeflow.settings.settings import Settings
from studies import small_families

ODD = [
    ("deepseek_v3", {"q_lora_rank": 24}, 24),
    ("qwen3_next", {"linear_value_head_dim": 12}, 48),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "enable_moe_block": False},
        16,
    ),
    ("gemma4_text", {"global_head_dim": 36}, 144),
    ("mixtral", {"intermediate_size": 80}, 80),
]
EVEN = [(family, {}, 0) for family in ("deepseek_v3", "qwen3_next", "granitemoehybrid", "gemma4_text", "lfm2_moe")]


@pytest.mark.parametrize(("family", "changes", "width"), ODD + EVEN)
def test_widths_that_no_group_divides_are_refused(family, changes, width, tmp_path, monkeypatch):
    monkeypatch.setattr(small_families, "_SMALL", small_families._SMALL | changes)
    monkeypatch.setattr(small_families, "_SMALL_MIXERS", {**small_families._SMALL_MIXERS, **changes})
    small_families.write_small(family, tmp_path)
    with closing(open_checkpoint(str(tmp_path))) as checkpoint:
        shape = read_model_config(checkpoint)
        refusal = gpu_refusal(Settings(model=str(tmp_path), quantize="int8"), shape)
        allocator = PlanarAllocator(
            torch.float16, torch.device("meta"), formats=WeightFormats("int8", "float16", head="int8")
        )
        if not width:
            assert refusal is None
            find_family(checkpoint).build(shape, allocator)
            return
        assert refusal is not None
        assert f"a row of {width} values does not divide into groups of 32" in refusal.reason
        with pytest.raises(AssertionError):
            find_family(checkpoint).build(shape, allocator)
