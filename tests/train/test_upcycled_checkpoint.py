import json

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.models.registry import read_model_config
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycled_checkpoint import check_source, mixtral_shapes, write_mixtral
from tests.tiny_llama import HIDDEN, LAYERS, write_tiny_llama


def make_routers(num_experts):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num_experts, HIDDEN, generator=generator) for _ in range(LAYERS)]


def write(source, folder, **overrides):
    recipe = UpcycleRecipe(**{"num_experts": 4, "top_k": 2, **overrides})
    folder.mkdir()
    checkpoint = open_checkpoint(source)
    write_mixtral(checkpoint, read_model_config(checkpoint), make_routers(recipe.num_experts), recipe, folder)
    checkpoint.close()
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


def logits_of(model):
    tokens = torch.arange(24).reshape(1, -1)
    with torch.inference_mode():
        return model.eval().float()(tokens).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 3), (4, 2)])
def test_unperturbed_experts_are_the_dense_model(tmp_path, tied, num_experts, top_k):
    source = tmp_path / "llama"
    write_tiny_llama(source, tie_word_embeddings=tied)
    folder = write(source, tmp_path / "moe", num_experts=num_experts, top_k=top_k, perturbation=0.0)
    dense = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    moe, info = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert moe.config.num_local_experts == num_experts
    torch.testing.assert_close(logits_of(moe), logits_of(dense), atol=1e-5, rtol=1e-5)


def test_experts_differ_by_the_perturbation_from_the_dense_network(llama, tmp_path):
    folder = write(llama, tmp_path / "moe", perturbation=0.1)
    dense, moe = open_checkpoint(llama), open_checkpoint(folder)
    seen = []
    for layer in range(LAYERS):
        for name, dense_name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            weight = dense.read(f"model.layers.{layer}.mlp.{dense_name}.weight")
            for expert in range(4):
                noise = moe.read(f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight") - weight
                assert 0.09 < (noise.std() / weight.std()).item() < 0.11
                assert abs((noise.mean() / weight.std()).item()) < 0.02
                seen.append(noise.flatten())
    correlation = torch.corrcoef(torch.stack(seen))
    assert (correlation - torch.eye(len(seen))).abs().max() < 0.15  # no two share their noise


def test_same_seed_same_bytes_other_seed_other_experts(llama, tmp_path):
    first, again = write(llama, tmp_path / "a", seed=5), write(llama, tmp_path / "b", seed=5)
    other = write(llama, tmp_path / "c", seed=6)
    weights = "model.safetensors"
    assert (first / weights).read_bytes() == (again / weights).read_bytes()
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_an_experts_noise_does_not_depend_on_how_many_there_are(llama, tmp_path):
    few = open_checkpoint(write(llama, tmp_path / "few", num_experts=3))
    many = open_checkpoint(write(llama, tmp_path / "many", num_experts=5))
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert torch.equal(few.read(name), many.read(name))


def test_what_is_written_is_what_was_announced(llama, tmp_path):
    recipe = UpcycleRecipe(num_experts=4, top_k=2)
    checkpoint = open_checkpoint(llama)
    announced = mixtral_shapes(checkpoint, read_model_config(checkpoint), recipe)
    written = open_checkpoint(write(llama, tmp_path / "moe"))
    assert {name: info.shape for name, info in written.tensors.items()} == announced
    routers = make_routers(4)
    for layer in range(LAYERS):
        found = written.read(f"model.layers.{layer}.block_sparse_moe.gate.weight")
        assert torch.equal(found, routers[layer].to(torch.bfloat16))


def test_rope_and_special_tokens_are_carried_over(llama, tmp_path):
    folder = write(llama, tmp_path / "moe")
    config = MixtralForCausalLM.from_pretrained(folder).config
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1


def test_what_an_old_llama_leaves_out_is_written_out(tmp_path):
    """Mixtral assumes other sizes than Llama where a key is missing, so the logits would change."""
    source = tmp_path / "llama"
    defaults = {"num_key_value_heads": 4, "rope_theta": 10000.0}
    write_tiny_llama(source, **defaults)
    config = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in {*defaults, "rope_parameters", "head_dim"}}
    (source / "config.json").write_text(json.dumps(kept))
    moe = MixtralForCausalLM.from_pretrained(write(source, tmp_path / "moe", perturbation=0.0))
    assert moe.config.rope_parameters["rope_theta"] == 10000.0
    dense = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    torch.testing.assert_close(logits_of(moe), logits_of(dense), atol=1e-5, rtol=1e-5)


def test_rope_scaling_is_carried_over(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_tiny_llama(tmp_path / "llama", rope_parameters=rope)
    moe = MixtralForCausalLM.from_pretrained(write(tmp_path / "llama", tmp_path / "moe", perturbation=0.0))
    assert moe.config.rope_parameters == rope
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16)
    torch.testing.assert_close(logits_of(moe), logits_of(dense), atol=1e-5, rtol=1e-5)


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts already"),
        ({"model_type": "gpt2"}, "gpt2, not llama"),
        ({"attention_bias": True}, "attention_bias is on"),
        ({"mlp_bias": True}, "mlp_bias is on"),
    ],
)
def test_other_sources_are_refused(tmp_path, changes, message):
    write_tiny_llama(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        check_source(open_checkpoint(tmp_path))


def test_a_missing_tensor_is_named(tmp_path):
    write_tiny_llama(tmp_path, num_hidden_layers=1)
    change_config(tmp_path, num_hidden_layers=2)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.input_layernorm\.weight: this tensor is missing"):
        mixtral_shapes(checkpoint, read_model_config(checkpoint), UpcycleRecipe())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts": 0}, "experts is 0"),
        ({"num_experts": 4, "top_k": 5}, "top-k is 5"),
        ({"top_k": 0}, "top-k is 0"),
        ({"perturbation": -0.1}, "perturbation is -0.1"),
        ({"perturbation": float("nan")}, "perturbation is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_recipes_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        UpcycleRecipe(**overrides)
