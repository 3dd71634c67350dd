"""DBRX: projections are one tensor, and so is each of the three matrices of all experts; the last one is turned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from moeflow.checkpoint.checkpoint import Checkpoint, TensorInfo
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.stacks import misfit
from moeflow.core.errors import CheckpointError

_BLOCK: Final = re.compile(r"transformer\.blocks\.(\d+)\.(.+)")
_ENDS: Final = {"transformer.wte.weight": "model.embed_tokens.weight", "transformer.norm_f.weight": "model.norm.weight"}
_IN_BLOCK: Final = {
    "norm_attn_norm.norm_1.weight": "input_layernorm.weight",
    "norm_attn_norm.norm_2.weight": "post_attention_layernorm.weight",
    "norm_attn_norm.attn.out_proj.weight": "self_attn.o_proj.weight",
    "ffn.router.layer.weight": "mlp.gate.weight",
}
_QKV: Final = "norm_attn_norm.attn.Wqkv.weight"
_EXPERTS: Final = {
    "ffn.experts.mlp.w1": "gate_proj",
    "ffn.experts.mlp.v1": "up_proj",
    "ffn.experts.mlp.w2": "down_proj",
}


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files. Raises: CheckpointError if stacks are not as config.json says."""
    pieces: dict[str, TensorPiece] = {}
    for name, info in stored.tensors.items():
        found = _BLOCK.fullmatch(name)
        if found is None:
            pieces[_ENDS.get(name, name)] = TensorPiece(name, info.shape)
            continue
        prefix, part = f"model.layers.{found[1]}", found[2]
        if part == _QKV:
            pieces |= _projections(prefix, name, info)
        elif part in _EXPERTS:
            num_experts = _num_experts(stored)
            check_num_tensors(len(pieces) + num_experts, stored.path)
            pieces |= _experts(f"{prefix}.mlp.experts", _EXPERTS[part], name, info, num_experts)
        else:
            renamed = f"{prefix}.{_IN_BLOCK[part]}" if part in _IN_BLOCK else name
            pieces[renamed] = TensorPiece(name, info.shape)
        check_num_tensors(len(pieces), stored.path)
    return pieces


def _projections(prefix: str, name: str, info: TensorInfo) -> Mapping[str, TensorPiece]:
    """Cut [hidden + 2 KV * D, hidden] into queries, as wide as hidden states, keys and values."""
    if len(info.shape) != 2 or info.shape[0] <= info.shape[1] or (info.shape[0] - info.shape[1]) % 2:
        raise misfit(name, info, "queries as wide as hidden states, keys and values")
    rows, hidden = info.shape
    sizes = {"q_proj": hidden, "k_proj": (rows - hidden) // 2, "v_proj": (rows - hidden) // 2}
    pieces, first = {}, 0
    for part, size in sizes.items():
        pieces[f"{prefix}.self_attn.{part}.weight"] = TensorPiece(name, (size, hidden), first)
        first += size
    return pieces


def _experts(prefix: str, part: str, name: str, info: TensorInfo, num_experts: int) -> Mapping[str, TensorPiece]:
    """Cut [E * I, hidden] into experts."""
    if len(info.shape) != 2 or info.shape[0] % num_experts:
        raise misfit(name, info, f"{num_experts} experts one below the other")
    rows, hidden = info.shape
    width, is_turned = rows // num_experts, part == "down_proj"
    shape = (hidden, width) if is_turned else (width, hidden)
    return {
        f"{prefix}.{expert}.{part}.weight": TensorPiece(name, shape, expert * width, is_turned)
        for expert in range(num_experts)
    }


def _num_experts(stored: Checkpoint) -> int:
    ffn: Any = stored.config.get("ffn_config")
    count = ffn.get("moe_num_experts") if isinstance(ffn, dict) else None
    if type(count) is not int or count < 1:
        raise CheckpointError(
            "has no 'moe_num_experts' within 'ffn_config', a positive number",
            file=stored.config_file,
            remedy="Download the model again",
        )
    return count
