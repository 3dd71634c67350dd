"""The text model, also in checkpoints with image and audio input."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import Cache, close, load, tokens
from tests.models.test_gemma4_text import CONFIGS

IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
SOUNDS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(1)
    text = CONFIGS["as published"].to_dict() | {"pad_token_id": 0}
    config = Gemma4Config(text_config=text, vision_config=IMAGES, audio_config=SOUNDS, attn_implementation="eager")
    return Gemma4ForConditionalGeneration(config).eval()


def test_text_gives_the_same_logits(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    for part in ("language_model", "vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        assert any(name.startswith(f"model.{part}.") for name in names)
    ids = tokens(40)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    close(Cache(load(tmp_path)).run({"a": ids})["a"], want)


def test_stacks_of_other_shapes_are_refused(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.language_model.layers.0.experts.gate_up_proj"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has the shape \[8, 47, 32\], where 3 dimensions with 2 equal parts"):
        load(tmp_path)


def test_a_config_without_text_is_refused():
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    with pytest.raises(CheckpointError, match="has no 'text_config', an object"):
        shape_of(config)
