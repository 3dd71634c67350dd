"""Granite MoE: experts are stacked, gate rows before up rows, which are one tensor in the shared network, too.

block_sparse_moe.input_linear.weight   [E, 2 width, hidden]
block_sparse_moe.output_linear.weight  [E, hidden, width]
shared_mlp.input_linear.weight         [2 width, hidden]
shared_mlp.output_linear.weight        [hidden, width]
"""

from __future__ import annotations

import re
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.stacks import check_stack, cut_rows

_NETWORK: Final = re.compile(r"(.+)\.(block_sparse_moe|shared_mlp)\.(input_linear|output_linear)\.weight")
_PARTS: Final = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files. Raises: CheckpointError if networks have other shapes."""
    pieces: dict[str, TensorPiece] = {}
    for name, info in stored.tensors.items():
        found = _NETWORK.fullmatch(name)
        if found is None:
            pieces[name] = TensorPiece(name, info.shape)
        else:
            is_stack, parts = found[2] == "block_sparse_moe", _PARTS[found[3]]
            check_stack(name, info, 3 if is_stack else 2, len(parts))
            check_num_tensors(len(pieces) + len(parts) * (info.shape[0] if is_stack else 1), stored.path)
            block = f"{found[1]}.{found[2]}"
            prefixes = [f"{block}.experts.{it}" for it in range(info.shape[0])] if is_stack else [block]
            pieces |= dict(cut_rows(prefixes, parts, name, info))
        check_num_tensors(len(pieces), stored.path)
    return pieces
