"""Importance matrices: the mean squares of what transformers' own model feeds its matrices."""

from __future__ import annotations

import copy
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen2MoeConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.models.importance import load_importance
from moeflow.planner.known_importance import importance_place, known_importance_file
from moeflow.train import importance_learning
from moeflow.train.importance_learning import ensure_importance, learn_importance
from tests.models import test_gemma4_text
from tests.models.parity import SHAPE, random_model
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

TEXTS = [[5, 9, 200, 31, 7, 77, 12], [3] * 20 + [90, 14], [61, 8, 4]]
PRIOR, LEAST = importance_learning._PRIOR_TOKENS, importance_learning._MIN_SHARE


def learnt(folder):
    with closing(open_checkpoint(folder)) as checkpoint:
        return learn_importance(checkpoint, TEXTS)


def finished(mean):
    return (mean / mean.mean() + LEAST).float()


def inputs_of(model, modules):
    """Return what each module got over all texts, in transformers' model."""
    got = {name: [] for name in modules}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: got[name].append(args[0].detach().flatten(0, -2)))
        for name, module in model.named_modules()
        if name in modules
    ]
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).double() for name, parts in got.items()}


def assert_close(got, want):
    torch.testing.assert_close(torch.from_numpy(got), want.float(), rtol=1e-4, atol=1e-5)


def test_of_experts_attention_and_output_projection(tmp_path):
    model = write_tiny_mixtral(tmp_path)
    found = learnt(tmp_path)
    attention = [f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in PARTS]
    inputs = inputs_of(model, [*attention, "model.layers.0.mlp", "model.layers.1.mlp", "lm_head"])
    for name in [*attention, "lm_head"]:
        assert_close(found[f"{name}.weight"], finished(inputs[name].square().mean(dim=0)))
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        for layer in (0, 1):
            prefix = f"model.layers.{layer}.block_sparse_moe"
            wanted = of_experts(inputs[f"model.layers.{layer}.mlp"], checkpoint, prefix)
            for name, importance in wanted.items():
                assert_close(found[name], importance)


PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def of_experts(x, checkpoint, prefix):
    """Return the importance of the inputs of experts' matrices, from a layer's input [T, H]."""

    def matrix(name):
        return checkpoint.read(f"{prefix}.{name}.weight").double()

    chosen = (x @ matrix("gate").T).topk(2, dim=1).indices
    ups, downs = [], []
    for expert in range(4):
        rows = x[(chosen == expert).any(dim=1)]
        units = F.silu(rows @ matrix(f"experts.{expert}.w1").T) * (rows @ matrix(f"experts.{expert}.w3").T)
        ups.append(rows.square())
        downs.append(units.square())
    found = {}
    for part, squares in (("w1", ups), ("w3", ups), ("w2", downs)):
        all_mean = torch.cat(squares).mean(dim=0)
        for expert, own in enumerate(squares):
            mean = (own.sum(dim=0) + PRIOR * all_mean) / (len(own) + PRIOR)
            found[f"{prefix}.experts.{expert}.{part}.weight"] = finished(mean)
    return found


def test_of_shared_experts_whose_results_the_next_layer_gets(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = random_model(Qwen2MoeConfig(**SHAPE | {"vocab_size": 258}, **experts, shared_expert_intermediate_size=40))
    model.save_pretrained(tmp_path)
    found = learnt(tmp_path)
    parts = [f"mlp.shared_expert.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    names = [f"model.layers.{layer}.{part}" for layer in range(3) for part in (*parts, "self_attn.q_proj")]
    for name, inputs in inputs_of(model, names).items():
        assert_close(found[f"{name}.weight"], finished(inputs.square().mean(dim=0)))


def test_where_networks_and_experts_have_norms_of_their_own(tmp_path):
    config = copy.deepcopy(test_gemma4_text.CONFIGS["as published"])
    config.vocab_size = 258
    model = random_model(config)
    model.save_pretrained(tmp_path)
    found = learnt(tmp_path)
    names = [f"model.layers.{layer}.mlp.{part}" for layer in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    names += ["model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.o_proj", "lm_head"]
    experts = [f"model.layers.{layer}.experts" for layer in range(3)]
    inputs = inputs_of(model, [*names, *experts])
    for name in names:
        stored = "model.embed_tokens" if name == "lm_head" else name
        assert_close(found[f"{stored}.weight"], finished(inputs[name].square().mean(dim=0)))
    for layer, name in enumerate(experts):
        ups = [found[f"model.layers.{layer}.moe.experts.{expert}.up_proj.weight"] for expert in range(8)]
        whole = finished(inputs[name].square().mean(dim=0)).numpy()
        assert all(np.corrcoef(own, whole)[0, 1] > 0.9 for own in ups)


def test_of_a_dense_model(tmp_path):
    model = write_tiny_llama(tmp_path)
    found = learnt(tmp_path)
    names = [f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    for name, inputs in inputs_of(model, names).items():
        assert_close(found[f"{name}.weight"], finished(inputs.square().mean(dim=0)))


def test_every_matrix_but_routers_has_some(tmp_path):
    write_tiny_mixtral(tmp_path)
    found = learnt(tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        matrices = {name: info.shape for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    left_out = {name for name in matrices if name not in found}
    assert left_out == {
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.block_sparse_moe.gate.weight" for n in (0, 1)),
    }
    assert all(found[name].shape == (matrices[name][1],) for name in found)
    assert all(importance.min() > 0 for importance in found.values())


def test_it_is_learnt_once_and_kept(tmp_path, monkeypatch):
    write_tiny_mixtral(tmp_path / "model")
    monkeypatch.setattr(importance_learning, "TOKENS_PER_TEXT", 64)
    told = []
    first = ensure_importance(str(tmp_path / "model"), tmp_path, 1, lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1]
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        file = importance_place(checkpoint, tmp_path)
        assert known_importance_file(checkpoint, tmp_path) == file
    monkeypatch.setattr(importance_learning, "learn_importance", None)  # would fail
    again = ensure_importance(str(tmp_path / "model"), tmp_path, 1)
    assert first.keys() == again.keys()
    assert all((first[name] == again[name]).all() for name in first)
    file.write_bytes(b"damaged")
    assert load_importance(file) is None


def test_encoders_are_refused(tmp_path):
    write_tiny_switch(tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        learnt(tmp_path)
