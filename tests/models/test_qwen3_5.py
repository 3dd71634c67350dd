"""Qwen3.5 as it is published: with a vision part next to the text model, and with stacked or separate experts."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.plausibility import read_eos_token_ids
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Cache, Parity, close, load, make_pair, tokens
from tests.models.test_qwen3_next import MOE

IMAGES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
DENSE = {key: value for key, value in MOE.items() if "expert" not in key and key != "moe_intermediate_size"}
WITH_IMAGES = {
    "experts": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeTextConfig(**MOE | {"eos_token_id": 5}),
    ),
    "dense": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig(**DENSE | {"eos_token_id": 5})),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(Qwen3_5TextConfig(**DENSE), tmp_path_factory.mktemp("qwen3_5_text"))


class TestQwen35WithoutExperts(Parity):
    pass


def write(kind, folder):
    config_class, model_class, text = WITH_IMAGES[kind]
    torch.manual_seed(1)
    config = config_class(text_config=text, vision_config=IMAGES, attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn(weight.shape) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_text_gives_the_same_logits(tmp_path, kind):
    theirs = write(kind, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.") for name in names)
    ids = tokens(40)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    ours = load(tmp_path)
    close(Cache(ours).run({"a": ids})["a"], want)
    assert read_eos_token_ids(open_checkpoint(tmp_path)) == (5,)


@pytest.mark.parametrize("is_misshapen", [False, True])
def test_stacked_experts(tmp_path, is_misshapen):
    """As Alibaba publishes them; transformers cuts them up."""
    write("experts", tmp_path)
    want = Cache(load(tmp_path)).run({"a": tokens(20)})["a"]
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if re.search(r"\.experts\.\d+\.", name)]
    num_experts = MOE["num_experts"]
    for prefix in {name.split(".experts.")[0] for name in experts}:
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}.experts.{it}.{part}.weight") for it in range(num_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}.experts.gate_up_proj"] = gate_up[:, 1:] if is_misshapen else gate_up
        tensors[f"{prefix}.experts.down_proj"] = parts["down_proj"]
    assert experts
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    if is_misshapen:
        with pytest.raises(
            CheckpointError, match=r"has the shape .*, where 3 dimensions with 2 equal parts are expected"
        ):
            load(tmp_path)
        return
    assert torch.equal(Cache(load(tmp_path)).run({"a": tokens(20)})["a"], want)


@pytest.mark.parametrize("stated", [None, False, True])
def test_the_whole_config_says_whether_embeddings_are_tied(stated):
    text = Qwen3_5TextConfig(**DENSE).to_dict() | {"tie_word_embeddings": True}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    assert shape_of(config | {"tie_word_embeddings": stated}).embeddings.tie_word_embeddings is (stated is not False)


def test_widths_are_those_of_dense_networks():
    config = Qwen3_5TextConfig(**DENSE).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    shape = shape_of(config)
    assert (shape.routing.num_experts, shape.feed_forward.intermediate_size) == (0, SHAPE["intermediate_size"])
