"""The text model in checkpoints that see images, too: as transformers names its parts now, and as it did before."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Cache, close, load, tokens

IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(1)
    text = Gemma3TextConfig(**SHAPE, head_dim=12, sliding_window=9)
    config = Gemma3Config(text_config=text, vision_config=IMAGES, mm_tokens_per_image=4, attn_implementation="eager")
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("is_old", [False, True])
def test_text_gives_the_same_logits(theirs, tmp_path, is_old):
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old, new = "language_model.model.", "model.language_model."
    found, wanted = (new, old) if is_old else (old, new)
    named = {name: name.replace(found, wanted) for name in tensors}
    assert any(name.startswith(wanted) for name in named.values())
    save_file({named[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    ids = tokens(40)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    close(Cache(load(tmp_path)).run({"a": ids})["a"], want)


def test_a_config_without_text_is_refused():
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    with pytest.raises(CheckpointError, match="has no 'text_config', an object"):
        shape_of(config)
