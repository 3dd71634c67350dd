"""Whole GGUF models in blocks of every kind, and mixed as llama.cpp mixes them, against torch on gguf's own values."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeflow.checkpoint.gguf.grids import LEVEL_KINDS
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.cpu import extension
from moeflow.kernels.weight_format import FORMATS, GGUF_BLOCK_KINDS
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from moeflow.models.packing import slab_spec
from moeflow.planner.choices.weight_choice import WeightChoice, own_precision
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.checkpoint.block_models import FAMILIES, HIDDEN, VOCAB, as_q4_k_m, write_block_model
from tests.models.parity import CPU, held_weights, in_mixed_passes

GRIDS = {kind.name: levels for kind, levels in LEVEL_KINDS.items()}  # not kept as they are, but without loss
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
SEQUENCES = {
    name: torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    for name, count in {"a": 30, "b": 7, "c": 18, "d": 1, "e": 33}.items()
}


def uniform(kind):
    return lambda name: "F32" if "ffn_gate_inp" in name else kind


def choice_of(path, **more) -> WeightChoice:
    checkpoint = open_checkpoint(path)
    return own_precision(checkpoint, lambda _: True, **more).with_routers(checkpoint)


def logits(path, formats: WeightFormats | None):
    allocator = TensorAllocator(torch.float32, CPU) if formats is None else PackedAllocator(torch.float32, CPU, formats)
    model = load_model(open_checkpoint(path), allocator)
    return in_mixed_passes(model, SEQUENCES, block_size=16)  # as kernels want it


def assert_near(got, want):
    """16-bit activations err by about 2e-5 in each product."""
    for name, expected in want.items():
        assert (got[name] - expected).norm() <= 2e-3 * expected.norm(), name


def test_every_kind_stays_as_it_is(tmp_path):
    """In each kind a model of one of the families: what dense layers and experts do in each, tests/kernels has."""
    for kind, family in zip((*GGUF_BLOCK_KINDS, *GRIDS), itertools.cycle(FAMILIES), strict=False):
        path = write_block_model(tmp_path / f"{kind}-{family}.gguf", family, uniform(kind))
        choice = choice_of(path)
        assert GRIDS.get(kind, kind) in FORMATS[choice.matrices].keeps
        assert (choice.embeddings, choice.layers) == (choice.matrices, ())
        assert_near(logits(path, choice.formats), logits(path, None))


def test_what_gate_and_up_have_in_common_is_what_they_are_kept_in(tmp_path):
    """Two of GGUF's grids come down to the same levels; for two other types, the reason is that no format holds
    both."""

    def kind_of(gate, up):
        kinds = {"ffn_gate_inp": "F32", "ffn_gate_exps": gate, "ffn_up_exps": up}
        return lambda name: next((kind for part, kind in kinds.items() if part in name), "Q6_K")

    choice = choice_of(write_block_model(tmp_path / "grids.gguf", "qwen3moe", kind_of("IQ2_XXS", "IQ2_XS")))
    assert {layer.up for layer in choice.layers} == {"levels-iq2"}
    assert "most matrices are stored so" in choice.reason
    choice = choice_of(write_block_model(tmp_path / "two.gguf", "qwen3moe", kind_of("Q4_K", "Q5_K")))
    assert {layer.up for layer in choice.layers} == {"float32"}
    assert {layer.down for layer in choice.layers} == {"q6_k"}
    assert "float32 holds Q4_K and Q5_K together, as gate and up projections" in choice.reason


@pytest.mark.parametrize("family", FAMILIES)
class TestMixed:
    @pytest.fixture
    def path(self, tmp_path, family):
        return write_block_model(tmp_path / "mixed.gguf", family, as_q4_k_m)

    def test_each_matrix_has_its_own_format(self, path, family):
        choice = choice_of(path)
        assert (choice.matrices, choice.embeddings, choice.head) == ("q4_k", "q4_k", "q6_k")
        assert [layer.v_proj for layer in choice.layers] == ["q6_k", "q4_k", "q6_k"]
        assert [layer.down for layer in choice.layers] == ["q6_k", "q4_k", "q6_k"]
        assert {getattr(it, part) for it in choice.layers for part in ("q_proj", "k_proj", "o_proj", "up")} == {"q4_k"}

    def test_where_layers_may_not_differ_it_is_float32(self, path, family):
        choice = choice_of(path, can_differ=False)
        assert (choice.matrices, choice.layers, choice.head) == ("float32", (), None)

    def test_logits_are_those_of_the_values(self, path, family):
        assert_near(logits(path, choice_of(path).formats), logits(path, None))

    def test_layers_one_by_one_are_the_same_bits(self, path, family, monkeypatch):
        formats = choice_of(path).formats
        at_once = logits(path, formats)
        monkeypatch.setattr("moeflow.models.layers.packed_layers.PackedLayers.of", lambda *_: None)
        by_stage = logits(path, formats)
        assert all(torch.equal(at_once[name], by_stage[name]) for name in SEQUENCES)

    def test_costs_are_what_is_held(self, path, family):
        choice = choice_of(path)
        model = load_model(open_checkpoint(path), PackedAllocator(torch.float32, CPU, choice.formats))
        costs = costs_of(model.config, choice)
        assert costs.shape.num_norms == 2
        held = sum(info.num_bytes for info in open_checkpoint(path).tensors.values())
        assert held_weights(model)
        assert held <= costs.model_bytes <= 1.05 * held

    def test_slabs_are_as_large_as_the_experts_of_their_layer(self, path, family):
        spec = slab_spec(open_checkpoint(path), choice_of(path).formats)
        if family == "llama":
            assert (spec.expert_formats, spec.slab_bytes, spec.slab_bytes_of_layers) == ((), 0, ())
            return
        assert spec.expert_formats == (("q4_k", "q6_k"), ("q4_k", "q4_k"), ("q4_k", "q6_k"))
        up, down = (FORMATS[name].bits_per_value * HIDDEN * HIDDEN / 8 for name in ("q4_k", "q6_k"))
        for slab_bytes, wanted in zip(spec.layer_bytes, (2 * up + down, 3 * up, 2 * up + down), strict=True):
            assert wanted <= slab_bytes <= 1.02 * wanted
        assert spec.slab_bytes == max(spec.layer_bytes)


def costs_of(shape: ModelConfig, choice: WeightChoice) -> ModelCosts:
    formats = Formats(
        matrices=choice.matrices,
        embeddings=choice.embeddings,
        kv="float32",
        routers=choice.routers,
        head=choice.head,
        layers=choice.layers,
    )
    return ModelCosts(shape, formats)
