"""Stacks of experts, each matrix cut out by its definition."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.renamed import dbrx, gpt_oss, granitemoe
from moeflow.checkpoint.renamed.renamed_checkpoint import RenamedCheckpoint, TensorPiece
from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import FakeCheckpoint

EXPERTS, HIDDEN, WIDTH = 6, 8, 40
PREFIX = "model.layers.3.mlp.experts"


def write(folder, model_type, tensors):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def gpt_oss_stacks():
    return {
        f"{PREFIX}.gate_up_proj": torch.randn(EXPERTS, HIDDEN, 2 * WIDTH).bfloat16(),
        f"{PREFIX}.gate_up_proj_bias": torch.randn(EXPERTS, 2 * WIDTH),
        f"{PREFIX}.down_proj": torch.randn(EXPERTS, WIDTH, HIDDEN).bfloat16(),
        f"{PREFIX}.down_proj_bias": torch.randn(EXPERTS, HIDDEN),
    }


def test_experts_of_gpt_oss_have_gate_and_up_in_turn(tmp_path):
    stacks = gpt_oss_stacks()
    checkpoint = write(tmp_path, "gpt_oss", stacks | {"model.norm.weight": torch.ones(HIDDEN)})
    gate_up, up_bias, down, down_bias = stacks.values()
    expected = {"model.norm.weight": torch.ones(HIDDEN)}
    for expert in range(EXPERTS):
        own = f"{PREFIX}.{expert}"
        for first, part in enumerate(("gate", "up")):
            expected[f"{own}.{part}_proj.weight"] = gate_up[expert, :, first::2].T
            expected[f"{own}.{part}_proj.bias"] = up_bias[expert, first::2]
        expected[f"{own}.down_proj.weight"] = down[expert].T
        expected[f"{own}.down_proj.bias"] = down_bias[expert]
    check(checkpoint, expected)
    assert sum(info.num_bytes for info in checkpoint.tensors.values()) == sum(
        tensor.nbytes for tensor in expected.values()
    )


def check(checkpoint, expected):
    assert checkpoint.tensors.keys() == expected.keys()
    for name, want in expected.items():
        assert checkpoint.tensors[name].shape == want.shape
        assert torch.equal(checkpoint.read(name), want)
        if want.dim() == 2:
            for start, stop in ((0, 1), (1, 5), (len(want) - 2, len(want))):
                rows = checkpoint.read_rows(name, start, stop)
                assert torch.equal(rows.values, want[start:stop])
                assert rows.numbers.tolist() == list(range(start, stop))


def test_what_another_family_calls_so_is_no_stack(tmp_path):
    stacks = gpt_oss_stacks()
    check(write(tmp_path, "llama", stacks), stacks)


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        (
            "gate_up_proj",
            (EXPERTS, HIDDEN),
            r"has the shape \[6, 8\], where 3 dimensions with a last one of 2 parts are expected",
        ),
        ("gate_up_proj", (EXPERTS, HIDDEN, 7), r"has the shape \[6, 8, 7\], where 3 dimensions"),
        ("down_proj_bias", (EXPERTS, HIDDEN, 1), "where 2 dimensions with a last one of 1 parts are expected"),
    ],
)
def test_other_shapes_are_refused(tmp_path, name, shape, complaint):
    with pytest.raises(CheckpointError, match=complaint) as error:
        write(tmp_path, "gpt_oss", {f"{PREFIX}.{name}": torch.zeros(shape)})
    assert error.value.tensor == f"{PREFIX}.{name}"


def test_a_square_matrix_is_turned_in_parts_too():
    """A stack of one expert; its transposed piece has the shape of the stored tensor."""
    stored = FakeCheckpoint({}, {"stack": torch.arange(9.0).view(3, 3)})
    turned = RenamedCheckpoint(stored, {"piece": TensorPiece("stack", (3, 3), is_turned=True)})
    assert torch.equal(turned.read_rows("piece", 1, 3).values, turned.read("piece")[1:3])
    assert torch.equal(turned.read("piece"), stored.weights["stack"].t())


@pytest.mark.parametrize(
    ("module", "name", "shape"),
    [
        (dbrx, "transformer.blocks.0.ffn.experts.mlp.w1", (0, 2)),
        (granitemoe, "model.layers.0.block_sparse_moe.input_linear.weight", (1 << 40, 0, 2)),
        (gpt_oss, "model.layers.0.mlp.experts.gate_up_proj", (1 << 40, 0, 2)),
    ],
)
def test_endless_stacks_are_refused_before_they_are_cut(module, name, shape, monkeypatch):
    monkeypatch.setattr(module, "TensorPiece", None)  # which none may be made of
    config = {"ffn_config": {"moe_num_experts": 1 << 40}}
    with pytest.raises(CheckpointError, match="tensors, where at most"):
        module.find_pieces(FakeCheckpoint(config, {name: torch.zeros(shape)}))
