"""An output projection that files have although their config ties it to the embeddings, held against transformers."""

import json
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
)

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.mapped import map_weights
from moeflow.core.errors import CheckpointError
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from moeflow.models.packing import pack_model
from tests.models.parity import CPU, SHAPE, Cache, close, load, needs_extension, random_model, tokens
from tests.models.test_encoder_decoder import INPUTS, OUTPUTS, Sequences, expected
from tests.models.test_encoder_decoder import load as load_encoder_decoder
from tests.models.test_gemma3 import IMAGES
from tests.models.test_qwen3_5 import write as write_qwen
from tests.tiny_switch import write_tiny_switch, write_tiny_t5

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
IDS = tokens(12)
TIED = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, tie_word_embeddings=True),
}
STORED = ["absent", "equal", "different"]


def store_head(folder, kind, embeddings=EMBEDDINGS):
    """Make a tied checkpoint's head one of `STORED`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert HEAD not in tensors
    if kind != "absent":
        table = tensors[embeddings]
        tensors[HEAD] = table.clone() if kind == "equal" else torch.randn_like(table) * 0.15
    save_file(tensors, file, {"format": "pt"})


def edit_config(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@torch.inference_mode()
def logits_of(theirs, ids=IDS):
    return theirs(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", TIED)
def test_a_stored_head_goes_before_the_config(tmp_path, family, stored):
    random_model(TIED[family]).save_pretrained(tmp_path)
    store_head(tmp_path, stored)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) is (stored != "different")
    close(Cache(load(tmp_path)).run({"a": IDS})["a"], logits_of(theirs))


@needs_extension
@pytest.mark.parametrize("stored", STORED)
def test_a_packed_model_has_the_stored_head(tmp_path, stored):
    random_model(TIED["mixtral"]).save_pretrained(tmp_path)
    store_head(tmp_path, stored)
    formats = WeightFormats("float32", "float32")
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        pack_model(checkpoint, tmp_path / "slabs", formats)
        memory = map_weights(read_slab_index(tmp_path / "slabs"))
        mapped = load_model(checkpoint, PackedAllocator(torch.float32, CPU, formats, memory))
    close(Cache(mapped).run({"a": IDS})["a"], logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)))


def write_gemma(folder):
    text = Gemma3TextConfig(**SHAPE, head_dim=12, sliding_window=9)
    torch.manual_seed(2)
    config = Gemma3Config(text_config=text, vision_config=IMAGES, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def say(config, whole, text):
    """Say of embeddings whether they are tied; None: nothing."""
    for part, stated in ((config, whole), (config["text_config"], text)):
        part.pop("tie_word_embeddings", None)
        if stated is not None:
            part["tie_word_embeddings"] = stated


@pytest.mark.parametrize(("whole", "text"), [(True, True), (None, True), (True, None), (False, True)])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_a_text_model_has_the_stored_head_wherever_its_config_ties_it(tmp_path, family, whole, text):
    if family == "gemma3":
        write_gemma(tmp_path)
        (table,) = (name for name in load_file(tmp_path / "model.safetensors") if name.endswith("embed_tokens.weight"))
        store_head(tmp_path, "different", table)
    else:
        write_qwen("dense", tmp_path)
        assert HEAD in load_file(tmp_path / "model.safetensors")
    edit_config(tmp_path, lambda config: say(config, whole, text))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    close(Cache(load(tmp_path)).run({"a": IDS})["a"], logits_of(theirs))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("write", [write_tiny_switch, write_tiny_t5])
def test_an_encoder_decoder_has_the_stored_head(tmp_path, write, stored):
    write(tmp_path)
    store_head(tmp_path, stored, "shared.weight")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    (found,) = Sequences(load_encoder_decoder(tmp_path, None), INPUTS).run([(0, 0, OUTPUTS[0])])
    close(found, expected(theirs, INPUTS[0], OUTPUTS[0]))


@needs_extension
@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_a_second_table_of_embeddings_is_refused_unless_it_is_a_copy(tmp_path, name):
    write_tiny_switch(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors["shared.weight"].clone()
    save_file(tensors, file)
    load(tmp_path)
    tensors[name][3, 5] += 1.0
    save_file(tensors, file)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        for take in (
            lambda: load_model(checkpoint, TensorAllocator(torch.float32, CPU)),
            lambda: pack_model(checkpoint, tmp_path / "slabs", WeightFormats("float32", "float32")),
        ):
            with pytest.raises(CheckpointError, match=r"differs from shared\.weight") as error:
                take()
            assert error.value.tensor == name
