"""Quantized folders against matrices written number by number: values, blocks, pieces of rows, and refusals."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import BLOCK_KINDS, FORMATS
from tests.checkpoint import packings
from tests.checkpoint.packings import (
    AUTO_ROUND,
    FP8,
    GPTQ,
    MODELOPT,
    QUANTIZATIONS,
    awq,
    compressed,
    float8,
    gptq,
    int_quantized,
    pack_quantized,
)
from tests.kernels.blocks import values_of

LAYER = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{LAYER}.weight"


def write(folder, settings, tensors, **more):
    config = {"model_type": "llama", "quantization_config": settings} | more
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_layer(folder, settings, store, rows, cols, seed=0):
    """Write one matrix beside floats, and return the folder and its values."""
    tensors, weight = store(rows, cols, seed)
    named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
    return write(folder, settings, named | {"model.norm.weight": torch.ones(4)}), weight


def read_as_values(checkpoint, name, start, stop):
    stored = checkpoint.read_rows(name, start, stop)
    assert stored.numbers.tolist() == list(range(start, stop))
    return stored.values if stored.block_kind is None else values_of(stored.block_kind, stored.values)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_values_are_those_that_were_stored(tmp_path, name):
    quantization, store, kind = QUANTIZATIONS[name]
    for rows, cols in ((40, 256), (128, 512), (256, 256)):
        folder, weight = write_layer(tmp_path, quantization, store, rows, cols)
        checkpoint = open_checkpoint(folder)
        info = checkpoint.tensors[WEIGHT]
        assert (info.shape, info.stored_as) == ((rows, cols), kind)
        assert set(checkpoint.tensors) == {WEIGHT, "model.norm.weight"}
        assert "quantization_config" not in checkpoint.config
        in_file = sum(tensor.nbytes for part, tensor in store(rows, cols, 0)[0].items() if part != "weight_shape")
        assert info.num_bytes == in_file
        assert torch.equal(checkpoint.read(WEIGHT), weight)
        for start, stop in ((0, rows), (0, 1), (16, 32), (5, 23), (rows - 1, rows)):
            assert torch.equal(read_as_values(checkpoint, WEIGHT, start, stop), weight[start:stop])
        assert torch.equal(checkpoint.read("model.norm.weight"), torch.ones(4))


@pytest.mark.parametrize(
    ("quantization", "store", "cols", "kind"),
    [
        ({"quant_method": "awq", "group_size": 32}, awq(32), 96, "INT4_G32"),
        ({"quant_method": "awq", "group_size": 64}, awq(64), 576, "INT4_G64"),
        ({"quant_method": "awq", "group_size": 96}, awq(96), 288, "INT4_G32"),
        (GPTQ | {"bits": 4, "group_size": -1}, gptq(4, 192), 192, "INT4_G64"),
        ({"quant_method": "mxfp4"}, packings.mxfp4, 96, "MXFP4"),
        (QUANTIZATIONS["nvfp4"][0], QUANTIZATIONS["nvfp4"][1], 288, "NVFP4"),
        (MODELOPT, QUANTIZATIONS["modelopt nvfp4"][1], 32, "NVFP4"),
    ],
)
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_rows_of_any_number_of_groups(tmp_path, quantization, store, cols, kind):
    folder, weight = write_layer(tmp_path, quantization, store, 40, cols)
    stored = open_checkpoint(folder).read_rows(WEIGHT, 3, 21)
    assert stored.block_kind == kind
    packed = PackedWeight.allocate(18, cols, next(name for name in FORMATS if kind in FORMATS[name].keeps))
    packed.fill(stored.values, torch.arange(18), kind)
    assert torch.equal(packed.unpack(), weight[3:21])


@settings(max_examples=25)
@given(data=st.data())
def test_shapes_that_hypothesis_makes_up(tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(QUANTIZATIONS)))
    quantization, store, _ = QUANTIZATIONS[name]
    rows, cols = 8 * data.draw(st.integers(1, 20)), 256 * data.draw(st.integers(1, 3))
    folder, weight = write_layer(
        tmp_path_factory.mktemp("folder"), quantization, store, rows, cols, data.draw(st.integers(0, 99))
    )
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert torch.equal(read_as_values(open_checkpoint(folder), WEIGHT, start, stop), weight[start:stop])


@pytest.mark.parametrize(
    ("quantization", "store", "cols", "described"),
    [
        ({"quant_method": "awq", "group_size": 16}, awq(16), 256, "int4 in groups of 16 with float16 scales"),
        (GPTQ | {"bits": 8, "group_size": 64}, gptq(8, 64), 256, "int8 in groups of 64 with float16 scales"),
        (
            compressed("int-quantized", num_bits=8, strategy="channel"),
            int_quantized(dtype=torch.float32),
            256,
            "int8 in groups of 256 with float32 scales",
        ),
        (FP8 | {"weight_block_size": [64, 64]}, float8((64, 64)), 256, "float8 in blocks of 64 x 64"),
        (FP8 | {"weight_block_size": [128, 128]}, float8(), 160, "float8 in blocks of 128 x 128"),
        (MODELOPT, QUANTIZATIONS["modelopt nvfp4"][1], 48, "NVFP4 in rows of 48"),
        (QUANTIZATIONS["nvfp4"][0], QUANTIZATIONS["nvfp4"][1], 48, "NVFP4 in rows of 48"),
    ],
)
def test_what_no_block_holds_is_widened(tmp_path, quantization, store, cols, described):
    folder, weight = write_layer(tmp_path, quantization, store, 40, cols)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors[WEIGHT].stored_as == described
    assert described not in BLOCK_KINDS
    stored = checkpoint.read_rows(WEIGHT, 3, 21)
    assert stored.block_kind is None
    assert torch.equal(stored.values, weight[3:21])


class TestStacksOfExperts:
    """As gpt-oss has them, in the words of transformers."""

    @pytest.mark.parametrize(("model_type", "takes_turns"), [("gpt_oss", True), ("qwen3_moe", False)])
    def test_each_expert_has_its_rows(self, tmp_path, model_type, takes_turns):
        random = torch.Generator().manual_seed(0)
        num_experts, width, hidden = 3, 24, 64
        blocks = torch.randint(0, 256, (num_experts, 2 * width, hidden // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(110, 130, (num_experts, 2 * width, hidden // 32), generator=random, dtype=torch.uint8)
        down, down_scales = blocks[..., :1, :].contiguous(), scales[..., :1].contiguous()
        prefix = "model.layers.0.mlp.experts"
        tensors = {
            f"{prefix}.gate_up_proj_blocks": blocks,
            f"{prefix}.gate_up_proj_scales": scales,
            f"{prefix}.down_proj_blocks": down,
            f"{prefix}.down_proj_scales": down_scales,
        }
        folder = write(tmp_path, {"quant_method": "mxfp4"}, tensors, model_type=model_type)
        checkpoint = open_checkpoint(folder)
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, H, 2I]
        their_down = convert_moe_packed_tensors(down, down_scales, dtype=torch.float32)
        assert len(checkpoint.tensors) == 3 * num_experts
        for expert in range(num_experts):
            gate_up = theirs[expert].T
            gate = gate_up[::2] if takes_turns else gate_up[:width]
            up = gate_up[1::2] if takes_turns else gate_up[width:]
            for part, want in (("gate", gate), ("up", up), ("down", their_down[expert].T)):
                name = f"{prefix}.{expert}.{part}_proj.weight"
                assert checkpoint.tensors[name].shape == tuple(want.shape)
                assert torch.equal(checkpoint.read(name), want)
                assert torch.equal(read_as_values(checkpoint, name, 3, 17), want[3:17])

    def test_more_experts_than_names_fit_into_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr("moeflow.checkpoint.file_errors.MAX_TENSORS", 5)
        blocks, scales = torch.zeros(3, 2, 1, 16, dtype=torch.uint8), torch.zeros(3, 2, 1, dtype=torch.uint8)
        tensors = {"a.experts.gate_up_proj_blocks": blocks, "a.experts.gate_up_proj_scales": scales}
        with pytest.raises(CheckpointError, match="holds 6 tensors"):
            open_checkpoint(write(tmp_path, {"quant_method": "mxfp4"}, tensors))

    def test_other_stacks(self, tmp_path):
        blocks, scales = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8)
        folder = write(tmp_path, {"quant_method": "mxfp4"}, {"experts.w1_blocks": blocks, "experts.w1_scales": scales})
        with pytest.raises(CheckpointError, match="neither gate_up_proj nor down_proj"):
            open_checkpoint(folder)


def named_parts(tensors):
    return {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}


def refused(folder, quantization, tensors):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write(folder, quantization, tensors))
    return caught.value


def test_layers_that_are_left_as_they_are_are_no_other_way(tmp_path):
    for quantization in (
        AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16, "group_size": -1}}},
        GPTQ | {"bits": 4, "group_size": 128, "dynamic": {"-:lm_head": {}, "+:.*": {"bits": 4, "group_size": 128}}},
    ):
        folder, weight = write_layer(tmp_path, quantization, gptq(), 40, 256)
        assert torch.equal(open_checkpoint(folder).read(WEIGHT), weight)


class TestRefused:
    @pytest.mark.parametrize(
        ("quantization", "problem"),
        [
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\), which is not supported"),
            ({"bits": 4}, "method not named"),
            (GPTQ | {"bits": 3}, "bits 3 is not supported, only 4, 8"),
            (GPTQ | {"bits": True}, "bits True is not supported"),
            (GPTQ | {"bits": 4, "group_size": 0}, "group_size 0 is no number of values"),
            (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
            ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported, only 'gemm'"),
            ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported, only 4"),
            (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
            (FP8 | {"weight_block_size": [128]}, r"blocks of \[128\] are no rows and columns"),
            ({"quant_method": "compressed-tensors"}, "config_groups names no group"),
            (compressed("nvfp4-pack-quantized", num_bits=4), "format 'nvfp4-pack-quantized' is not supported"),
            (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32), "group_size 32 is not"),
            (compressed("nvfp4-pack-quantized", num_bits=8, type="float", group_size=16), "num_bits 8 is not"),
            (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported, only 'NVFP4'"),
            (MODELOPT | {"group_size": 32}, "group_size 32 is not supported, only 16"),
            (MODELOPT | {"quantization": "NVFP4"}, "where quantization is no object"),
            (compressed("float-quantized", num_bits=4, type="float"), "num_bits 4 is not supported, only 8"),
            (GPTQ | {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic gives '.*' a bits of its own, 8"),
            (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format '.*' is not supported"),
            (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported, only 'int'"),
            (
                AUTO_ROUND | {"extra_config": {"a": {"group_size": 32}}},
                "extra_config gives 'a' a group_size of its own",
            ),
            (compressed("marlin-24", num_bits=4), "format 'marlin-24' is not supported"),
            (compressed("pack-quantized", num_bits=4, strategy="token"), "strategy 'token' is not supported"),
            ({"quant_method": "awq"}, "but no tensor is stored so"),
        ],
    )
    def test_what_config_says(self, tmp_path, quantization, problem):
        error = refused(tmp_path, quantization, {"a.weight": torch.ones(2, 2)})
        assert re.search(problem, error.problem)
        assert error.file == str(tmp_path / "config.json")
        assert "unquantized" in error.remedy
        assert "GGUF" in error.remedy

    def test_more_than_one_way(self, tmp_path):
        both = compressed("pack-quantized", num_bits=4)
        both["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8}}
        assert "in more than one way" in refused(tmp_path, both, {"a.weight": torch.ones(2, 2)}).problem

    @pytest.mark.parametrize(
        "name", ["mxfp4", "fp8", "awq", "gptq", "int4", "int4 asymmetric", "int8", "nvfp4", "modelopt nvfp4"]
    )
    def test_parts_that_are_missing_or_of_another_shape(self, tmp_path, name):
        quantization, store, _ = QUANTIZATIONS[name]
        tensors = {f"{LAYER}.{part}": tensor for part, tensor in store(32, 256, 0)[0].items()}
        for part in sorted(tensors):
            if part.endswith(("g_idx", "weight_shape", "weight_zero_point")):
                continue
            error = refused(tmp_path, quantization, {other: it for other, it in tensors.items() if other != part})
            assert (
                "is missing" in error.problem or "no tensor is stored so" in error.problem or "no part" in error.problem
            )
        for part, tensor in tensors.items():
            if part.endswith(("weight", "weight_shape", "weight_packed", "qweight", "_blocks")):
                continue
            tensor = tensor.reshape(-1) if tensor.dim() == 0 else tensor
            longer = tensors | {part: torch.cat([tensor, tensor])}
            error = refused(tmp_path, quantization, longer)
            assert error.tensor == part
            assert "has the shape" in error.problem

    def test_groups_that_config_says_may_be_of_any_inputs(self, tmp_path):
        settings = GPTQ | {"bits": 4, "group_size": 128, "desc_act": True}
        folder, weight = write_layer(tmp_path, settings, gptq(), 32, 256)
        assert torch.equal(open_checkpoint(folder).read(WEIGHT), weight)
        named = {f"{LAYER}.{part}": tensor for part, tensor in gptq()(32, 256, 0)[0].items()}
        for other in ({f"{LAYER}.g_idx": named[f"{LAYER}.g_idx"].flip(0).contiguous()}, None):
            if other is None:
                del named[f"{LAYER}.g_idx"]
            error = refused(tmp_path, settings, named | (other or {}))
            assert "where desc_act True moves inputs to other groups" in error.problem
        whole_rows = settings | {"group_size": -1}
        folder, weight = write_layer(tmp_path, whole_rows, gptq(4, 256), 32, 256)
        assert torch.equal(open_checkpoint(folder).read(WEIGHT), weight)

    def test_inputs_in_another_order(self, tmp_path):
        tensors, _ = gptq()(32, 256, 0)
        named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
        named[f"{LAYER}.g_idx"] = named[f"{LAYER}.g_idx"].flip(0).contiguous()
        checkpoint = open_checkpoint(write(tmp_path, GPTQ | {"bits": 4}, named))
        with pytest.raises(CheckpointError, match="act order"):
            checkpoint.read_rows(WEIGHT, 0, 16)
        tensors, _ = pack_quantized()(32, 256, 0)
        named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
        named[f"{LAYER}.weight_g_idx"] = torch.zeros(256, dtype=torch.int32)
        assert "act order" in refused(tmp_path, QUANTIZATIONS["int4"][0], named).problem

    def test_a_float_that_is_none(self, tmp_path):
        tensors, _ = float8()(32, 256, 0)
        tensors["weight"].view(torch.uint8)[9, 100] = 0xFF
        named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
        checkpoint = open_checkpoint(write(tmp_path, QUANTIZATIONS["fp8"][0], named))
        checkpoint.read_rows(WEIGHT, 0, 9)
        with pytest.raises(CheckpointError, match="holds a NaN in rows 0 to 16"):
            checkpoint.read_rows(WEIGHT, 0, 16)

    def test_an_exponent_that_is_none(self, tmp_path):
        tensors, _ = packings.mxfp4(32, 256, 0)
        tensors["weight_scales"][9, 3] = 255
        named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
        checkpoint = open_checkpoint(write(tmp_path, {"quant_method": "mxfp4"}, named))
        with pytest.raises(CheckpointError, match="holds a NaN"):
            checkpoint.read_rows(WEIGHT, 0, 16)

    @pytest.mark.parametrize("bits", [127, 128, 255])
    @pytest.mark.parametrize("name", ["nvfp4", "modelopt nvfp4"])
    def test_a_scale_that_is_none(self, tmp_path, name, bits):
        quantization, store, _ = QUANTIZATIONS[name]
        tensors, _ = store(32, 256, 0)
        tensors["weight_scale"].view(torch.uint8)[9, 3] = bits
        checkpoint = open_checkpoint(write(tmp_path, quantization, named_parts(tensors)))
        checkpoint.read_rows(WEIGHT, 0, 9)
        with pytest.raises(CheckpointError, match="holds a NaN or a negative number in rows 0 to 16"):
            checkpoint.read_rows(WEIGHT, 0, 16)

    @pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize(("name", "part"), [("nvfp4", "weight_global_scale"), ("modelopt nvfp4", "weight_scale_2")])
    def test_a_scale_of_all_that_is_none(self, tmp_path, name, part, number):
        quantization, store, _ = QUANTIZATIONS[name]
        tensors = store(32, 256, 0)[0] | {part: torch.tensor(number)}
        checkpoint = open_checkpoint(write(tmp_path, quantization, named_parts(tensors)))
        for read in (lambda: checkpoint.read_rows(WEIGHT, 0, 16), lambda: checkpoint.read(WEIGHT)):
            with pytest.raises(CheckpointError, match="where a number above zero is expected") as caught:
                read()
            assert caught.value.tensor == f"{LAYER}.{part}"

    def test_rows_that_end_within_a_group(self, tmp_path):
        quantization, store, _ = QUANTIZATIONS["nvfp4"]
        tensors = store(32, 256, 0)[0]
        tensors["weight_packed"] = tensors["weight_packed"][:, :-4].contiguous()
        problem = refused(tmp_path, quantization, named_parts(tensors)).problem
        assert "rows of 248 numbers, which are no groups of 16" in problem

    def test_tensors_that_are_no_part(self, tmp_path):
        tensors, _ = awq()(32, 256, 0)
        named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
        error = refused(tmp_path, QUANTIZATIONS["awq"][0], named | {"model.other": torch.zeros(3, dtype=torch.int32)})
        assert error.tensor == "model.other"
        assert "int32" in error.problem


class TestModelOptsOwnFile:
    """`hf_quant_config.json`, where config.json says nothing of a quantization."""

    @staticmethod
    def write(folder, of_weights, tensors, **config):
        write(folder, None, tensors, **config)
        settings = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": of_weights}
        (folder / "hf_quant_config.json").write_text(json.dumps(settings))
        return folder

    @pytest.mark.parametrize(("name", "algo"), [("modelopt nvfp4", "NVFP4"), ("modelopt fp8", "FP8")])
    def test_says_what_weights_are(self, tmp_path, name, algo):
        _, store, kind = QUANTIZATIONS[name]
        tensors, weight = store(32, 256, 0)
        of_weights = {"quant_algo": algo, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        more = {f"{LAYER}.input_scale": torch.ones(()), "model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
        folder = self.write(tmp_path, of_weights, named_parts(tensors) | more | {"lm_head.weight": torch.ones(4, 4)})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.tensors[WEIGHT].stored_as == kind
        assert set(checkpoint.tensors) == {WEIGHT, "lm_head.weight"}
        assert torch.equal(checkpoint.read(WEIGHT), weight)

    def test_is_to_blame_for_what_it_says(self, tmp_path):
        folder = self.write(tmp_path, {"quant_algo": "MIXED_PRECISION"}, {"a.weight": torch.ones(2, 2)})
        with pytest.raises(CheckpointError, match="quant_algo 'MIXED_PRECISION' is not supported") as caught:
            open_checkpoint(folder)
        assert caught.value.file == str(tmp_path / "hf_quant_config.json")

    @pytest.mark.parametrize("of_weights", [None, "", {}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}])
    def test_may_say_nothing_of_weights(self, tmp_path, of_weights):
        checkpoint = open_checkpoint(self.write(tmp_path, of_weights, {"a.weight": torch.ones(2, 2)}))
        assert torch.equal(checkpoint.read("a.weight"), torch.ones(2, 2))

    def test_config_json_goes_before_it(self, tmp_path):
        tensors, weight = awq()(32, 256, 0)
        folder = self.write(
            tmp_path, {"quant_algo": "NVFP4"}, named_parts(tensors), quantization_config=QUANTIZATIONS["awq"][0]
        )
        assert torch.equal(open_checkpoint(folder).read(WEIGHT), weight)


def test_scales_of_activations_are_left_out(tmp_path):
    tensors, _ = float8("all")(32, 256, 0)
    named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
    named |= {f"{LAYER}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    named[f"{LAYER}.input_global_scale"] = torch.ones(1)
    assert set(open_checkpoint(write(tmp_path, FP8, named)).tensors) == {WEIGHT}


def test_a_word_of_awq_by_hand():
    """From AutoAWQ's documentation: outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest four bits up."""
    assert packings.words(torch.arange(8).numpy()[None], 4, packings.AWQ_ORDER).item() == 0x75316420
