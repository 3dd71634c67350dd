"""Quantized Hugging Face folders through the engine: in memory, mapped from packed weights, with experts on disk."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from tests.checkpoint.quantized_models import write_quantized_model
from tests.engine.streamed_runs import run
from tests.engine.test_block_models import PROMPTS, config_of

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.mark.parametrize(
    ("quantization", "is_mixed", "weight_format"),
    [
        ("mxfp4", True, "mxfp4"),
        ("fp8", False, "fp8"),
        ("gptq 32", False, "int4-g32"),
        ("int8", True, "int8-g128"),
        ("nvfp4", True, "nvfp4"),
        ("modelopt nvfp4", False, "nvfp4"),
    ],
)
def test_tokens_are_the_same_wherever_weights_lie(tmp_path, monkeypatch, quantization, is_mixed, weight_format):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    write_quantized_model(tmp_path, "qwen3_moe", quantization, lambda name: not is_mixed or "experts" in name)
    model = tmp_path / "quantized"
    resident = config_of(model, cache_dir=tmp_path)
    assert resident.weight_format == weight_format
    assert bool(resident.layer_formats) == is_mixed
    expected = run(resident, PROMPTS)
    index = pack(str(model), None, cache_dir=tmp_path)
    mapped = config_of(model, cache_dir=tmp_path)
    assert mapped.packed_file == str(index.path)
    assert run(mapped, PROMPTS) == expected
    for num_slots in (4, 7):
        experts = ExpertSlotsConfig(
            packed_weights_file=str(index.path), num_slots=num_slots, slab_bytes=index.spec.slab_bytes
        )
        assert run(dataclasses.replace(resident, experts=experts), PROMPTS) == expected


@pytest.mark.parametrize("quantization", ["nvfp4", "modelopt nvfp4"])
def test_exact_activations_give_the_tokens_of_the_weights_in_float32(tmp_path, quantization):
    """Each matrix has a scale of its own for all its weights: queries, keys, values, gates, ups."""
    folder = write_quantized_model(tmp_path, "qwen3_moe", quantization)
    exact = config_of(folder / "quantized", cache_dir=tmp_path, exact_activations=True)
    assert (exact.weight_format, exact.is_wide) == ("nvfp4", True)
    plain = config_of(folder / "plain", cache_dir=tmp_path, dtype="float32")
    assert run(exact, PROMPTS) == run(plain, PROMPTS)


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}])
def test_what_the_user_asks_for_is_made_of_the_values(tmp_path, settings):
    folder = write_quantized_model(tmp_path, "mixtral", "awq")
    got, want = (run(config_of(folder / it, cache_dir=tmp_path, **settings), PROMPTS) for it in ("quantized", "plain"))
    assert got == want
