"""Weights stay as the checkpoint has them where a format holds them without loss; otherwise somebody said so."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.checkpoint.checkpoint import TensorInfo, TensorTable
from moeflow.core.errors import ConfigError
from moeflow.planner.choices.mixes import mixed_formats
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, instead_of, own_precision
from tests.models.fake_checkpoint import FakeCheckpoint
from tests.shapes import MIXTRAL

VOCAB, HIDDEN, HEAD_DIM, WIDTH, NUM_EXPERTS = 20, 64, 4, 32, 4
LAYER = "model.layers.0."
EMBEDDINGS, ROUTER = "model.embed_tokens.weight", f"{LAYER}block_sparse_moe.gate.weight"
MATRIX, NORM = f"{LAYER}self_attn.q_proj.weight", "model.norm.weight"
KEYS = f"{LAYER}self_attn.k_proj.weight"  # with as many rows as there are experts
ATTENDED = 8 * HEAD_DIM
SHAPES = {
    EMBEDDINGS: (VOCAB, HIDDEN),
    NORM: (HIDDEN,),
    MATRIX: (ATTENDED, HIDDEN),
    KEYS: (HEAD_DIM, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, ATTENDED),
    f"{LAYER}input_layernorm.weight": (HIDDEN,),
    f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
    ROUTER: (NUM_EXPERTS, HIDDEN),
}
for expert in range(NUM_EXPERTS):
    for part, shape in {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}.items():
        SHAPES[f"{LAYER}block_sparse_moe.experts.{expert}.{part}.weight"] = shape
CONFIG = {
    "model_type": "mixtral",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}


class Headers(FakeCheckpoint):
    """A checkpoint that has headers only."""

    def __init__(self, stored):
        super().__init__(dict(CONFIG), {})
        self.stored = stored

    @property
    def tensors(self):
        file = self.path / "model.gguf"
        return TensorTable({name: TensorInfo(shape, 0, self.stored[name], file) for name, shape in SHAPES.items()})


def checkpoint(matrices, embeddings, more=None, routers="float32"):
    stored = {name: matrices if len(shape) == 2 else "float32" for name, shape in SHAPES.items()}
    stored |= {EMBEDDINGS: embeddings, ROUTER: routers}
    return Headers(stored | ({f"{LAYER}self_attn.v_proj.weight": more} if more else {}))


@pytest.mark.parametrize(
    ("stored", "want"),
    [
        (("Q4_0", "Q4_0"), ("int4", "int4")),
        (("Q4_0", "Q8_0"), ("int4", "int8")),
        (("Q8_0", "Q8_0", "Q4_0"), ("int8", "int8")),
        (("Q4_1", "Q8_0"), ("int4-min", "int8")),
        (("Q4_1", "Q4_1"), ("int4-min", "int4-min")),
        (("Q6_K", "Q4_K"), ("q6_k", "q4_k")),
        (("INT4_G32", "bfloat16"), ("int4-g32", "bfloat16")),
        (("F8_E4M3", "bfloat16"), ("fp8", "bfloat16")),
        (("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        (("bfloat16", "float32"), ("bfloat16", "float32")),
        (("float16", "Q8_0"), ("float32", "int8")),
    ],
)
def test_the_smallest_format_that_loses_nothing(stored, want):
    choice = own_precision(checkpoint(*stored), lambda choice: True)
    assert (choice.matrices, choice.embeddings, choice.is_own, choice.is_exact) == (*want, True, True)
    assert choice.formats.is_wide
    assert choice.has_integers == (stored[0] not in ("bfloat16", "float16") or "Q8_0" in stored)
    fast = own_precision(checkpoint(*stored), lambda choice: True, is_exact=False)
    assert fast == dataclasses.replace(choice, is_exact=False)
    assert not fast.formats.is_wide


@pytest.mark.parametrize(
    ("matrices", "values", "want"),
    [
        ("Q4_0", "Q4_1", ("int4", "int4-min")),
        ("Q4_K", "Q6_K", ("q4_k", "q6_k")),
        ("Q4_K", "IQ3_S", ("q4_k", "float32")),
        ("bfloat16", "float16", ("bfloat16", "float32")),
        ("float16", "bfloat16", ("float32", "bfloat16")),
    ],
)
def test_each_matrix_by_itself_where_no_format_but_float32_keeps_all(matrices, values, want):
    stored = checkpoint(matrices, matrices, values)
    choice = own_precision(stored, lambda choice: True)
    (layer,) = choice.layers
    assert (choice.matrices, layer.v_proj) == want
    assert {layer.q_proj, layer.k_proj, layer.o_proj, layer.up, layer.down} == {want[0]}
    assert choice.formats.layers == choice.layers
    alike = own_precision(stored, lambda choice: True, can_differ=False)
    assert (alike.matrices, alike.layers) == ("float32", ())


def test_what_no_smaller_format_holds_is_named():
    choice = own_precision(checkpoint("int8 in groups of 64", "bfloat16"), lambda choice: True)
    assert (choice.matrices, choice.embeddings) == ("float32", "bfloat16")
    assert choice.reason.endswith("no smaller format holds int8 in groups of 64")
    assert "no smaller" not in own_precision(checkpoint("INT8_G128", "bfloat16"), lambda choice: True).reason


def test_experts_downs_may_differ_from_their_ups_but_gates_do_not():
    stored = checkpoint("Q4_K", "Q4_K", "Q6_K")
    stored.stored |= {name: "Q5_K" for name in stored.stored if name.endswith("w2.weight")}
    (layer,) = own_precision(stored, lambda choice: True).layers
    assert (layer.up, layer.down) == ("q4_k", "q5_k")
    stored.stored |= {name: "Q5_K" for name in stored.stored if name.endswith("w1.weight")}
    (layer,) = own_precision(stored, lambda choice: True).layers
    assert (layer.up, layer.down) == ("float32", "q5_k")


def test_float32_that_does_not_fit_is_halved():
    choice = own_precision(checkpoint("float32", "float32"), lambda choice: choice.matrices != "float32")
    assert (choice.matrices, choice.embeddings, choice.is_exact) == ("bfloat16", "bfloat16", False)
    assert "would not fit" in choice.reason


def test_a_key_projection_with_as_many_rows_as_experts_is_no_router():
    stored = checkpoint("bfloat16", "bfloat16")
    assert SHAPES[KEYS] == SHAPES[ROUTER]
    stored.stored[KEYS] = "float32"
    choice = own_precision(stored, lambda choice: True)
    assert (choice.matrices, choice.layers[0].k_proj) == ("bfloat16", "float32")
    assert choice.with_routers(stored).routers == "float32"


@pytest.mark.parametrize(
    ("matrices", "routers", "want"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float16", "float32"),
        ("Q8_0", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_routers_stay_as_the_file_has_them(matrices, routers, want):
    stored = checkpoint(matrices, matrices, routers=routers)
    choice = own_precision(stored, lambda choice: True).with_routers(stored)
    assert choice.formats.routers == want
    asked = WeightChoice("bfloat16", "bfloat16").with_routers(stored)
    assert asked.formats.routers == ("bfloat16" if routers == "bfloat16" else "float32")


@pytest.mark.parametrize(
    ("weight_format", "want"),
    [
        ("float32", "--dtype bfloat16 or a smaller model"),
        ("bfloat16", "--quantize int8 or a smaller model"),
        ("int8", "--quantize q4_k or a smaller model"),
        ("int4", "a smaller model"),
        ("int4-min", "a smaller model"),
        ("q4_k", "a smaller model"),
    ],
)
def test_what_to_ask_for_instead(weight_format, want):
    assert instead_of(weight_format) == want


def test_a_mix_that_the_user_says():
    choice = explicit_choice("auto", "q4_k_m", MIXTRAL, can_pack=True)
    mixed = mixed_formats("q4_k_m", MIXTRAL)
    assert (choice.matrices, choice.embeddings, choice.layers) == (mixed.matrices, mixed.embeddings, mixed.layers)
    assert (choice.mix, choice.is_exact) == ("q4_k_m", False)
    with pytest.raises(ConfigError, match="CPU kernels"):
        explicit_choice("auto", "q4_k", MIXTRAL, can_pack=False)


def test_what_the_user_says():
    assert explicit_choice("auto", None, MIXTRAL, can_pack=False) is None
    assert explicit_choice("bfloat16", None, MIXTRAL, can_pack=False) == WeightChoice("bfloat16", "bfloat16")
    assert explicit_choice("auto", "int8", MIXTRAL, can_pack=True) == WeightChoice("int8", "int8")
    assert explicit_choice("auto", "int4", MIXTRAL, can_pack=True) == WeightChoice("int4", "int8")


@pytest.mark.parametrize(
    ("dtype", "quantize", "can_pack", "words"),
    [
        ("int3", None, True, "dtype 'int3'"),
        ("auto", "int3", True, "quantize 'int3'"),
        ("float32", "int8", True, "remove --quantize or --dtype"),
        ("auto", "int8", False, "CPU kernels"),
    ],
)
def test_what_makes_no_sense(dtype, quantize, can_pack, words):
    with pytest.raises(ConfigError, match=words):
        explicit_choice(dtype, quantize, MIXTRAL, can_pack=can_pack)
