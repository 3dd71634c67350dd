"""Weights stay as the checkpoint has them where a format holds them without loss; otherwise somebody said so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.core.errors import ConfigError
from moeflow.engine.weight_choice import WeightChoice, own_precision, wished

NUM_EXPERTS = 4
EMBEDDINGS, MATRIX, ROUTER, NORM = "model.embed_tokens.weight", "q_proj.weight", "gate.weight", "norm.weight"
SHAPES = {EMBEDDINGS: (20, 64), MATRIX: (32, 64), ROUTER: (NUM_EXPERTS, 64), NORM: (64,)}


def checkpoint(matrices: str, embeddings: str, more: str | None = None):
    kinds = {EMBEDDINGS: embeddings, MATRIX: matrices, ROUTER: "float32", NORM: "float32"}
    tensors = {name: TensorInfo(shape, 0, kinds[name], Path("f")) for name, shape in SHAPES.items()}
    if more:
        tensors["v_proj.weight"] = TensorInfo((32, 64), 0, more, Path("f"))
    return SimpleNamespace(tensors=tensors)


@pytest.mark.parametrize(
    ("stored", "want"),
    [
        (("Q4_0", "Q4_0"), ("int4", "int4")),
        (("Q4_0", "Q8_0"), ("int4", "int8")),
        (("Q8_0", "Q8_0", "Q4_0"), ("int8", "int8")),
        (("Q4_0", "Q8_0", "Q4_1"), ("float32", "int8")),
        (("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        (("bfloat16", "float32"), ("bfloat16", "float32")),
        (("bfloat16", "bfloat16", "float16"), ("float32", "bfloat16")),
        (("float16", "Q8_0"), ("float32", "int8")),
    ],
)
def test_the_smallest_format_that_loses_nothing(stored, want):
    choice = own_precision(checkpoint(*stored), SimpleNamespace(num_experts=NUM_EXPERTS), lambda choice: True)
    assert (choice.matrices, choice.embeddings) == want


def test_float32_that_does_not_fit_is_halved():
    shape = SimpleNamespace(num_experts=NUM_EXPERTS)
    choice = own_precision(checkpoint("float32", "float32"), shape, lambda choice: choice.matrices != "float32")
    assert (choice.matrices, choice.embeddings) == ("bfloat16", "bfloat16")
    assert "would not fit" in choice.reason


def test_bytes_are_counted_by_format():
    stored = checkpoint("bfloat16", "bfloat16")
    assert WeightChoice("float32", "float32").num_bytes(stored) == 4 * 64 * (20 + 32 + NUM_EXPERTS + 1)
    assert WeightChoice("int4", "int8").num_bytes(stored) == 36 * (32 + NUM_EXPERTS) + 68 * 20 + 4 * 64


def test_what_the_user_says():
    assert wished("auto", None, can_pack=False) is None
    assert wished("bfloat16", None, can_pack=False) == WeightChoice("bfloat16", "bfloat16")
    assert wished("auto", "int8", can_pack=True) == WeightChoice("int8", "int8")
    assert wished("auto", "int4", can_pack=True) == WeightChoice("int4", "int8")


@pytest.mark.parametrize(
    ("dtype", "quantize", "can_pack", "words"),
    [
        ("int3", None, True, "dtype 'int3'"),
        ("auto", "int3", True, "quantize 'int3'"),
        ("float32", "int8", True, "say one of the two"),
        ("auto", "int8", False, "CPU kernels"),
    ],
)
def test_what_makes_no_sense(dtype, quantize, can_pack, words):
    with pytest.raises(ConfigError, match=words):
        wished(dtype, quantize, can_pack=can_pack)
