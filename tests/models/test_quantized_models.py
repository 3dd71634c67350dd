"""Whole models in quantized Hugging Face folders, against torch on the unquantized weights that these stand for."""

from __future__ import annotations

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.kernels.cpu import extension
from moeflow.kernels.weight_format import FORMATS
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from tests.checkpoint.packings import QUANTIZATIONS
from tests.checkpoint.quantized_models import FAMILIES, stack_experts, write_quantized_model
from tests.models.parity import CPU, held_weights
from tests.models.test_block_models import SEQUENCES, assert_near, choice_of, costs_of, logits

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
ONE_OF_EACH_FORMAT = ("mxfp4", "fp8", "awq", "awq 64", "gptq 32", "int8", "nvfp4", "modelopt nvfp4")


@pytest.fixture(autouse=True)
def activations_stay_floats():
    """Beside bfloat16 and float8, too: rounded to bfloat16, some tokens would go to other experts."""
    extension.use_isa("avx512_vnni")
    yield
    extension.use_isa("")


def assert_as_plain(folder, formats: WeightFormats) -> None:
    assert_near(logits(folder / "quantized", formats), logits(folder / "plain", None))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_quantization_stays_as_it_is(tmp_path, quantization):
    folder = write_quantized_model(tmp_path, "qwen3_moe", quantization)
    choice = choice_of(folder / "quantized")
    assert FORMATS[choice.matrices].keeps == {QUANTIZATIONS[quantization][2]}
    assert (choice.embeddings, choice.routers, choice.layers) == ("bfloat16", "float32", ())
    plain = logits(folder / "plain", None)
    assert_near(logits(folder / "quantized", choice.formats), plain)
    torch_alone = logits(folder / "quantized", None)
    assert all(torch.equal(torch_alone[name], it) for name, it in plain.items())


@pytest.mark.parametrize("quantization", ONE_OF_EACH_FORMAT)
def test_memory_is_at_most_a_twentieth_more_than_the_file(tmp_path, quantization):
    path = write_quantized_model(tmp_path, "qwen3_moe", quantization) / "quantized"
    choice, checkpoint = choice_of(path), open_checkpoint(path)
    model = load_model(checkpoint, PackedAllocator(torch.float32, CPU, choice.formats))
    assert held_weights(model)
    in_file = sum(info.num_bytes for info in checkpoint.tensors.values())
    assert costs_of(model.config, choice).model_bytes <= 1.05 * in_file


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    folder = write_quantized_model(tmp_path, family, "awq")
    choice = choice_of(folder / "quantized")
    assert choice.matrices == "int4-g128"
    assert_as_plain(folder, choice.formats)


@pytest.mark.parametrize("quantization", ["mxfp4", "fp8", "int4"])
def test_attention_that_is_not_quantized_stays_bfloat16(tmp_path, quantization):
    folder = write_quantized_model(tmp_path, "qwen3_moe", quantization, lambda name: "self_attn" not in name)
    choice = choice_of(folder / "quantized")
    kind = QUANTIZATIONS[quantization][2]
    assert FORMATS[choice.matrices].keeps == {kind}
    assert {(layer.q_proj, layer.o_proj, layer.up, layer.down) for layer in choice.layers} == {
        ("bfloat16", "bfloat16", choice.matrices, choice.matrices)
    }
    assert_as_plain(folder, choice.formats)


def test_stacks_of_experts_are_the_same_model(tmp_path):
    path = write_quantized_model(tmp_path, "qwen3_moe", "mxfp4") / "quantized"
    formats = choice_of(path).formats
    one_by_one = logits(path, formats)
    stack_experts(path)
    stacked = logits(path, formats)
    assert all(torch.equal(stacked[name], one_by_one[name]) for name in SEQUENCES)


@pytest.mark.parametrize("quantization", ONE_OF_EACH_FORMAT)
def test_into_other_formats_they_go_as_their_values(tmp_path, quantization):
    folder = write_quantized_model(tmp_path, "mixtral", quantization)
    for name in ("float32", "bfloat16", "int8"):
        formats = WeightFormats(name, "float32")
        want, got = (logits(folder / it, formats) for it in ("plain", "quantized"))
        assert all(torch.equal(got[it], want[it]) for it in SEQUENCES)
