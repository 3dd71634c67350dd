"""Stacks of experts, each matrix cut out by its definition."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError

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
            r"has the shape \[6, 8\], where 3 dimensions are expected, the last of 2 parts",
        ),
        ("gate_up_proj", (EXPERTS, HIDDEN, 7), r"has the shape \[6, 8, 7\], where 3 dimensions"),
        ("down_proj_bias", (EXPERTS, HIDDEN, 1), "where 2 dimensions are expected"),
    ],
)
def test_other_shapes_are_refused(tmp_path, name, shape, complaint):
    with pytest.raises(CheckpointError, match=complaint) as error:
        write(tmp_path, "gpt_oss", {f"{PREFIX}.{name}": torch.zeros(shape)})
    assert error.value.tensor == f"{PREFIX}.{name}"
