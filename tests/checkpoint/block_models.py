"""Tiny GGUF models of random blocks, each matrix of any kind: what K-quants want is 256 columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch

from tests.kernels.blocks import random_blocks, values_of

VOCAB, HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, EXPERTS, TOP_K = 80, 256, 256, 3, 4, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
FAMILIES = ("llama", "qwen3moe")
SPREAD = 0.06  # of weights, so that neither hidden states nor scores grow


def write_block_model(file: Path, family: str, kind_of: Callable[[str], str], **parts: int) -> Path:
    """Write a model; `kind_of` maps gguf's name of each matrix to its kind of blocks, or "F32".

    `parts` are arguments of gguf's writer that have it write several files.
    """
    writer = gguf.GGUFWriter(file, family, **parts)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if family == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(TOP_K)
        writer.add_expert_feed_forward_length(WIDTH)
    for seed, (name, shape) in enumerate(_shapes(family).items()):
        if len(shape) == 1 or kind_of(name) == "F32":
            _add_floats(writer, name, shape, seed)
        else:
            kind = kind_of(name)
            blocks = blocks_like_weights(kind, int(np.prod(shape[:-1])), shape[-1], seed).numpy()
            writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def blocks_like_weights(kind: str, rows: int, cols: int, seed: int) -> torch.Tensor:
    """Return random blocks whose values spread as weights do."""
    if kind == "MXFP4":  # exponents are near their bias
        blocks = random_blocks(kind, rows, cols, seed)
        blocks.view(-1, 17)[:, 0] -= 3
        return blocks
    spread = values_of(kind, random_blocks(kind, rows, cols, seed)).std().item()
    return random_blocks(kind, rows, cols, seed, largest_scale=SPREAD / spread / 512)


def _add_floats(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * (0.1 if len(shape) == 1 else SPREAD) + (len(shape) == 1)
    writer.add_tensor(name, values.astype(np.float32))


def _shapes(family: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
        }
        if family == "llama":
            parts |= {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
        else:
            parts |= {
                "attn_q_norm": (HEAD_DIM,),
                "attn_k_norm": (HEAD_DIM,),
                "ffn_gate_inp": (EXPERTS, HIDDEN),
                "ffn_gate_exps": (EXPERTS, WIDTH, HIDDEN),
                "ffn_up_exps": (EXPERTS, WIDTH, HIDDEN),
                "ffn_down_exps": (EXPERTS, HIDDEN, WIDTH),
            }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def as_q4_k_m(name: str) -> str:
    """Return the kind that llama.cpp gives a matrix in files it calls Q4_K_M; the router stays in floats."""
    if "ffn_gate_inp" in name:
        return "F32"
    is_wider = name == "output.weight" or (("attn_v" in name or "ffn_down" in name) and "blk.1" not in name)
    return "Q6_K" if is_wider else "Q4_K"
