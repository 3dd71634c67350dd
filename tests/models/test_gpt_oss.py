import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.core.attention_config import RopeConfig
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.experts.remote.borrowing import borrowing_of
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import (
    SEQUENCES,
    SHAPE,
    Pair,
    Parity,
    in_mixed_passes,
    load,
    make_pair,
    random_model,
    their_logits,
)
from tests.models.test_block_models import choice_of

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
MOE = SHAPE | {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 12,
    "sliding_window": 9,
    "rope_parameters": YARN | {"truncate": False},
}
CONFIGS = {
    "as published": GptOssConfig(**MOE),
    "units are often clamped": GptOssConfig(**MOE, swiglu_limit=0.3, swiglu_alpha=1.3),
    "own order of layers, no attention biases": GptOssConfig(
        **MOE, attention_bias=False, layer_types=["full_attention", "full_attention", "sliding_attention"]
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("gpt_oss"))


class TestGptOss(Parity):
    pass


def write_mxfp4(folder) -> Pair:
    """Write a model as gpt-oss is published, and return transformers' with the values that blocks stand for."""
    config = GptOssConfig(**MOE | {"hidden_size": 64, "intermediate_size": 32})
    theirs = random_model(config)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    random = torch.Generator().manual_seed(0)
    for layer, block in enumerate(theirs.model.layers):
        for name, rows, cols in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            blocks = torch.randint(0, 256, (8, rows, cols // 32, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(122, 125, (8, rows, cols // 32), dtype=torch.uint8, generator=random)
            getattr(block.mlp.experts, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[prefix]
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    raw = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(raw))
    return Pair(theirs, load(folder), str(folder))


def test_mxfp4_means_what_transformers_makes_of_it(tmp_path):
    pair = write_mxfp4(tmp_path)
    for name, logits in in_mixed_passes(pair.ours, SEQUENCES).items():
        torch.testing.assert_close(logits, their_logits(pair.theirs, SEQUENCES[name]), atol=1e-3, rtol=0.0)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_mxfp4_stays_as_it_is(tmp_path):
    pair = write_mxfp4(tmp_path)
    choice = choice_of(tmp_path)
    assert (choice.matrices, {layer.up for layer in choice.layers}) == ("mxfp4", {"mxfp4"})
    ours = load(tmp_path, packed=choice.formats)
    for name, logits in in_mixed_passes(ours, SEQUENCES, block_size=16).items():
        want = their_logits(pair.theirs, SEQUENCES[name])
        assert (logits - want).norm() <= 5e-3 * want.norm()


def raw(**changes):
    config = GptOssConfig(**MOE).to_dict() | {"architectures": ["GptOssForCausalLM"]} | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_configs_as_published():
    """Keys of before transformers 5, and none where it says nothing."""
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
    old = {"rope_theta": 150000, "rope_scaling": yarn | {"original_max_position_embeddings": 4096}}
    shape = shape_of(raw(rope_parameters=..., layer_types=..., swiglu_alpha=..., **old))
    assert shape.attention.rope == RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)
    assert [kind.sliding_window for kind in shape.attention.layer_kinds] == [9, None, 9]
    assert {kind.rope for kind in shape.attention.layer_kinds} == {shape.attention.rope}
    assert (shape.feed_forward.swiglu_alpha, shape.feed_forward.swiglu_limit) == (1.702, 7.0)
    assert shape_of(raw(rope_parameters=...)).attention.rope == shape.attention.rope


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"swiglu_limit": -1.0}, "'swiglu_limit' is -1"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"layer_types": ["full_attention"]}, "'layer_types'"),
        ({"num_experts_per_tok": 9}, "9, of 8 experts"),
        ({"sliding_window": 0}, "'sliding_window' is 0"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        shape_of(raw(**changes))


def test_costs_count_biases_of_experts():
    theirs = random_model(CONFIGS["as published"])
    costs = ModelCosts(shape_of(raw()), Formats(matrices="float32", embeddings="float32", kv="float32"))
    layers = (p for name, p in theirs.named_parameters() if "layers" in name and p.dim() > 1)
    assert costs.layers_bytes == 4 * sum(p.numel() for p in layers)


def test_lenders_do_not_compute_such_experts():
    sizes = {"num_layers": 3, "num_experts": 8, "slab_bytes": 4096, "resident_bytes": 4096}
    spec = SlabSpec(identity="", weight_format="int8", embedding_format="int8", layout="", **sizes)
    with pytest.raises(ConfigError, match="SwiGLU experts without biases, and the experts of a gpt_oss model are not"):
        borrowing_of(spec, shape_of(raw()), cpu_isa="", is_wide=False)
