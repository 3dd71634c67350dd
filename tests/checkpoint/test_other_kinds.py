"""Folders of other kinds of models: the error names the kind and a remedy."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.registry import read_model_config
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral


def write_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))


def quantize_as_mlx(folder, settings):
    """Change a folder's matrices into the names, types and shapes that MLX has for 4 bits in groups of 32."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, weight in load_file(file).items():
        rows = weight.shape[0]
        if weight.dim() == 1:
            tensors[name] = weight
            continue
        tensors[name] = torch.zeros(rows, weight.shape[1] // 8, dtype=torch.uint32)
        for part in ("scales", "biases"):
            tensors[f"{name.removesuffix('weight')}{part}"] = torch.ones(rows, -(-weight.shape[1] // 32)).half()
    save_file(tensors, file, {"format": "mlx"})
    write_config(folder, **{key: {"group_size": 32, "bits": 4} for key in settings})


def mlx(folder):
    write_tiny_llama(folder)
    quantize_as_mlx(folder, ["quantization"])


def newer_mlx(folder):
    write_tiny_llama(folder)
    quantize_as_mlx(folder, ["quantization", "quantization_config"])


def wide_mlx(folder):
    """As unquantized MLX models have experts: stacked."""
    write_tiny_mixtral(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if ".experts.0.w1." in name]
    for name in names:
        stacked = torch.stack([tensors.pop(name.replace("experts.0", f"experts.{expert}")) for expert in range(4)])
        tensors[name.replace("experts.0.w1", "switch_mlp.gate_proj")] = stacked
    assert names
    save_file(tensors, file, {"format": "mlx"})


def adapter(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base-7B"})
    )
    save_file(
        {"base_model.model.layers.0.q_proj.lora_A.weight": torch.zeros(4, 8)}, folder / "adapter_model.safetensors"
    )


def adapter_beside_a_model(folder):
    """transformers adds such an adapter to its base, so the folder's own weights alone are another model."""
    write_tiny_llama(folder)
    adapter(folder)


def pipeline(folder):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    (folder / "unet").mkdir()


def part_of_a_pipeline(folder):
    write_config(folder, _class_name="UNet2DConditionModel")
    save_file({"conv_in.weight": torch.zeros(4, 8)}, folder / "diffusion_pytorch_model.safetensors")


BERT = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def bert(folder):
    BertModel(BERT).save_pretrained(folder)


def masked_bert(folder):
    BertForMaskedLM(BERT).save_pretrained(folder)
    write_config(folder, model_type="unheard-of")


@pytest.mark.parametrize(
    ("write", "problem", "remedy"),
    [
        (mlx, "quantized for MLX (4 bits, groups of 32)", "Take the Hugging Face model"),
        (newer_mlx, "quantized for MLX (4 bits, groups of 32)", "Take the Hugging Face model"),
        (wide_mlx, "weights in MLX's form", "Take the Hugging Face model"),
        (adapter, "adapter (LoRA) for its base model ('some/base-7B')", "merge_and_unload()"),
        (adapter_beside_a_model, "adapter (LoRA) for its base model ('some/base-7B')", "merge_and_unload()"),
        (pipeline, "a diffusers pipeline", "Take a language model"),
        (part_of_a_pipeline, "a part of a diffusers pipeline", "Take a language model"),
        (bert, "of the type 'bert', which encodes or classifies", "Take a model that generates"),
        (masked_bert, "of the type 'unheard-of', which encodes or classifies", "Take a model that generates"),
    ],
)
def test_another_kind_is_named(tmp_path, write, problem, remedy):
    write(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(open_checkpoint(tmp_path))
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert str(tmp_path) in str(caught.value.file)


@pytest.mark.parametrize("content", ["[]", "{", '{"base_model_name_or_path": 7}'])
def test_a_damaged_adapter_is_still_a_clear_error(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
