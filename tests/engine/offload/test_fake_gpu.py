"""A device's computation on tensors that only claim to be on a GPU: a tensor of the host among them is an error.

So a layer's stages are known to ask for nothing that lies on the other side, which no test in main memory would notice.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.offload.micro_batches import Cut, Side, cut_pass
from moeflow.kernels import device_arrays, rotary, routing
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.embedding import embedding
from moeflow.kernels.triton import launching
from moeflow.models.layers import attention as layers_attention
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import ExpertTensors
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.rotary import RotaryEmbeddings
from moeflow.models.registry import find_family, read_model_config
from tests.engine.offload.offloaded_runs import FAMILIES
from tests.models.parity import random_model


class AsInFile(TensorAllocator):
    """Leaves tensors in the order of the file, as slabs are."""

    rearranges = False


GPU, HOST = torch.device("cuda:0"), torch.device("cpu")
STARTS, COUNTS = (0, 3, 40, 41), (5, 2, 1, 1)  # prompts, a chunk, decodes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_s_stages_stay_on_the_device(tmp_path, monkeypatch, family):
    random_model(copy.deepcopy(FAMILIES[family])).bfloat16().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    shape = read_model_config(checkpoint)
    monkeypatch.setattr(rotary, "is_in_main_memory", lambda _: False)  # tensors without values have no NumPy array
    monkeypatch.setattr(torch, "tensor", without_values)
    monkeypatch.setattr(torch, "bincount", lambda ids, minlength: torch.empty(minlength, device=ids.device))
    monkeypatch.setattr(layers_attention, "attend", attend_in_part)
    monkeypatch.setattr(launching, "accepts", lambda _: False)  # kernels need a real GPU
    monkeypatch.setattr(routing, "_best", lambda ranks, count: ranks.topk(count, dim=-1).indices)  # sorting, too
    monkeypatch.setattr(device_arrays, "staged", lambda rows, device: [without_values(rows[0], device=device)])
    monkeypatch.setattr(device_arrays, "on_device", values_on)
    with FakeTensorMode(), torch.inference_mode():
        model = find_family(checkpoint).build(shape, AsInFile(torch.bfloat16, GPU))
        kv = BlocksOnGpu(shape)
        for batch in cut(model):
            hidden = embedding(batch.token_ids, model.embed_tokens)
            for layer in model.layers:
                if isinstance(layer.mlp, MoE):  # as slabs are: to index a tensor takes a real GPU
                    experts = layer.mlp.weights
                    layer.mlp.weights = ExpertTensors(list(experts.gate_up), list(experts.down))
                qkv = layer.pre_attention(hidden)
                for places in (batch.on_device, batch.in_window):
                    attended = layer.self_attn.attend_over(kv, qkv, places.rotary, places.attention)
                monkeypatch.setattr(FakeTensor, "tolist", even(batch.num_tokens * (shape.routing.top_k or 1)))
                hidden = layer.post_attention(hidden, attended)
            logits = model.logits(model.norm(hidden))
            assert (logits.device, logits.shape) == (GPU, (batch.num_tokens, shape.vocab_size))
            assert layer.self_attn.on_host().heads.q_norm is None or layer.self_attn.on_host().heads.q_norm.is_cpu
    checkpoint.close()


def even(num_pairs):
    """Return a replacement of `tolist`, which needs values: equal numbers of pairs for all experts."""

    def tolist(counts):
        if counts.dim() == 1 and len(counts) != num_pairs:
            return [num_pairs // len(counts) + (number < num_pairs % len(counts)) for number in range(len(counts))]
        return list(range(len(counts)))

    return tolist


def values_on(rows, device):
    return [without_values(row, device=device) for row in rows]


def without_values(data, dtype=torch.int64, device=HOST):
    """Stand for `torch.tensor`, which would ask a real GPU for memory."""
    return torch.empty(np.shape(data), dtype=dtype, device=device)


class BlocksOnGpu(KVBlocks):
    """Keys and values without storage, which torch views and writes to in ways that need a real GPU."""

    def __init__(self, shape):
        self.block_size, self.head_dim, self.handle = 16, shape.attention.head_dim, None

    def write(self, slots, k, v):
        assert {slots.device, k.device, v.device} == {GPU}


def attend_in_part(q, blocks, metadata, scores):
    """Stand for attention, whose masks torch makes in ways that need a real GPU."""
    assert {q.device, metadata.slots.device} == {GPU}
    return q.flatten(1)


def cut(model):
    sizes = [-(-(start + count) // 16) for start, count in zip(STARTS, COUNTS, strict=True)]
    blocks = [range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
    attention = AttentionMetadata.build(starts=STARTS, num_tokens=COUNTS, block_ids=blocks, block_size=16, device=HOST)
    context = ForwardContext(torch.arange(sum(COUNTS)), attention, None)
    host = Side(
        HOST, RotaryEmbeddings(model.config.attention.ropes, model.config.attention.head_dim, HOST), torch.float32
    )
    device = Side(GPU, model.rotary, torch.bfloat16)
    return cut_pass(torch.arange(sum(COUNTS)), context, host, device, Cut(5, 5, 0, decodes_on_host=False))
