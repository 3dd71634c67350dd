"""The tensors of a GPT as Megatron names them, how ranks cut them, and its order of queries, keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX: Final = re.compile(r"(?:module\.|model\.)*language_model\.")
_LAYER: Final = re.compile(r"(?:encoder|transformer)\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_EXPERT: Final = re.compile(
    r"mlp\.(?:deepspeed_moe|moe)\.experts\.(?:deepspeed_experts\.)?(\d{1,6})\.(dense_h_to_4h|dense_4h_to_h)"
)
_FINAL: Final = re.compile(r"(?:encoder|transformer)\.final_layernorm\.(weight|bias)")
_QKV: Final = re.compile(r"(?:self_)?attention\.query_key_value")
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")
_NETWORK: Final = {"dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_ENDS: Final = {  # stored name -> the tensor, and the axis that ranks cut
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "embedding.position_embeddings.weight": ("model.embed_positions.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
_IN_LAYER: Final = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "attention.dense": "self_attn.o_proj",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
    "mlp.deepspeed_moe.gate.wg": "mlp.gate",
    "mlp.moe.gate.wg": "mlp.gate",
}


class Place(msgspec.Struct, frozen=True):
    """A tensor in Hugging Face's terms, and how it follows from the parts of one that is stored."""

    name: str
    cut_axis: int | None = None  # that ranks cut; None: each has all of it
    third: int | None = None  # of queries, keys and values; None: it is all of the tensor
    is_expert: bool = False  # which ranks may have whole


def find_places(stored_name: str) -> Iterator[Place]:
    """Yield the tensors that a stored one contains; itself if it is unknown."""
    name = _PREFIX.sub("", stored_name, count=1)
    if name in _ENDS:
        yield Place(*_ENDS[name])
    elif found := _FINAL.fullmatch(name):
        yield Place(f"model.norm.{found[1]}")
    elif found := _LAYER.fullmatch(name):
        yield from _in_layer(f"model.layers.{int(found[1])}", found[2], found[3], stored_name)
    else:
        yield Place(stored_name)


def _in_layer(prefix: str, module: str, kind: str, stored_name: str) -> Iterator[Place]:
    if _QKV.fullmatch(module):
        for number, projection in enumerate(_PROJECTIONS):
            yield Place(f"{prefix}.self_attn.{projection}.{kind}", 0, number)
    elif expert := _EXPERT.fullmatch(module):
        part = _NETWORK[expert[2]]
        yield Place(f"{prefix}.mlp.experts.{int(expert[1])}.{part}.{kind}", _cut_axis(part, kind), is_expert=True)
    elif module in _IN_LAYER:
        name = _IN_LAYER[module]
        yield Place(f"{prefix}.{name}.{kind}", _cut_axis(name.rpartition(".")[2], kind))
    else:
        yield Place(stored_name)


def _cut_axis(part: str, kind: str) -> int | None:
    """Return the axis that ranks cut: outputs, or inputs where outputs are summed; None: ranks have all."""
    if part == "up_proj":
        return 0
    return 1 if part in ("down_proj", "o_proj") and kind == "weight" else None


def third_of(fused: Tensor, which: int, num_heads: int, version: float) -> Tensor:
    """Return queries, keys or values of some heads, in the order of a file's `checkpoint_version`.

    Shapes: fused [3 * heads * D, ...] -> [heads * D, ...].
    """
    rest = fused.shape[1:]
    if version >= 2:
        found = fused.reshape(num_heads, 3, -1, *rest)[:, which]
    elif version == 1:
        found = fused.reshape(num_heads, -1, 3, *rest)[:, :, which]
    else:
        found = fused.reshape(3, num_heads, -1, *rest)[which]
    return found.reshape(-1, *rest)
