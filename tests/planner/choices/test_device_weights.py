"""A GPU keeps the formats of packed files that its kernels read, and plans count the bytes that they take."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.registry import find_family, read_model_config
from moeflow.planner.choices.device_weights import own_on_device
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.planner.costs.model_costs import ModelCosts
from tests.checkpoint.block_models import as_q4_k_m, write_block_model
from tests.checkpoint.quantized_models import write_quantized_model

QUANTIZATIONS = {
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "fp8 rows": "fp8",
    "awq": "int4-g128",
    "awq 64": "int4-g64",
    "awq 32": "int4-g32",
    "gptq": "int4-g128",
    "auto-round": "int4-g128",
    "int4": "int4-g128",
    "int4 asymmetric": "int4-g32",
    "int8": "int8-g128",
    "gptq 8": "int8-g128",
    "nvfp4": "bfloat16",
}
KINDS = {
    "Q4_0": "int4",
    "Q5_0": "q5_0",
    "Q8_0": "int8",
    "IQ4_NL": "iq4_nl",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "MXFP4": "mxfp4",
    "IQ4_XS": "bfloat16",
}


def chosen_for(checkpoint: Checkpoint) -> WeightChoice:
    choice = own_on_device(checkpoint, has_bfloat16=True).with_routers(checkpoint)
    assert choice.embeddings == "bfloat16"
    held, costs = held_bytes(checkpoint, choice), ModelCosts(read_model_config(checkpoint), choice.costed("bfloat16"))
    assert held <= costs.model_bytes <= 1.02 * held  # norms count as float32
    return choice


def held_bytes(checkpoint: Checkpoint, choice: WeightChoice) -> int:
    """Return the bytes of everything that is allocated."""
    made: list[torch.Tensor] = []
    real = torch.empty

    def noted(*shape: object, **options: object) -> torch.Tensor:
        made.append(real(*shape, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        router = getattr(torch, choice.routers)
        allocator = PlanarAllocator(torch.bfloat16, torch.device("meta"), router, formats=choice.formats)
        find_family(checkpoint).build(read_model_config(checkpoint), allocator)
    return sum(it.nbytes for it in made)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_folders(quantization: str, tmp_path: Path) -> None:
    folder = write_quantized_model(tmp_path, "qwen3_moe", quantization)
    with closing(open_checkpoint(folder / "quantized")) as checkpoint:
        choice = chosen_for(checkpoint)
    expected = QUANTIZATIONS[quantization]
    assert (choice.matrices, choice.head, choice.layers, choice.routers) == (expected, None, (), "bfloat16")
    assert ("no kernel of theirs reads" in choice.reason) == (expected == "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_one_kind(kind: str, tmp_path: Path) -> None:
    file = write_block_model(tmp_path / "model.gguf", "qwen3moe", lambda name: "F32" if "inp" in name else kind)
    with closing(open_checkpoint(file)) as checkpoint:
        choice = chosen_for(checkpoint)
    expected = KINDS[kind]
    assert (choice.matrices, choice.layers, choice.routers) == (expected, (), "float32")
    assert choice.head == (None if expected == "bfloat16" else expected)


def test_each_matrix_of_a_file_keeps_its_own_kind(tmp_path: Path) -> None:
    def kind_of(name: str) -> str:
        return "Q3_K" if "attn_output" in name else as_q4_k_m(name)

    with closing(open_checkpoint(write_block_model(tmp_path / "model.gguf", "qwen3moe", kind_of))) as checkpoint:
        choice = chosen_for(checkpoint)
    first, second, third = choice.layers
    assert first == third
    assert (first.q_proj, first.v_proj, first.o_proj, first.up, first.down) == (
        "q4_k",
        "q6_k",
        "bfloat16",
        "q4_k",
        "q6_k",
    )
    assert (second.v_proj, second.o_proj, second.down) == ("q4_k", "bfloat16", "q4_k")
    assert choice.reason == (
        "the file's q4_k and q6_k, no value changes; other weights are bfloat16, and no GPU kernel reads Q3_K there"
    )
