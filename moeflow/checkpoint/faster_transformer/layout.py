"""Which of FasterTransformer's files a tensor is made of.

Matrices lie turned, [inputs, outputs]. Tensors split between ranks have a file for each rank. They are split along
their outputs, or along their inputs if outputs are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Stored:
    """Numbers in a file, or in one for each rank."""

    file: str  # its name, with {} for the rank if ranks cut it
    shape: tuple[int, ...]  # of one file, from the part on that is taken
    part: int = 0  # which of the parts of that shape
    take: int | None = None  # of three dimensions: which place of the second one; None: the shape has no such
    cut_axis: int = 0  # the dimension that ranks split after that
    is_turned: bool = False  # the tensor is the transpose of the result


def find_stored(config: Mapping[str, Any], num_ranks: int, has_head: bool) -> Iterator[tuple[str, Stored]]:
    """Yield (Hugging Face name, where its numbers are) of all tensors that a model has."""
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", Stored("model.wte.bin", (vocab_size, hidden))
    yield "model.embed_positions.weight", Stored("model.wpe.bin", (config["max_position_embeddings"], hidden))
    for kind in ("weight", "bias"):
        yield f"model.norm.{kind}", Stored(f"model.final_layernorm.{kind}.bin", (hidden,))
    if has_head:
        yield "lm_head.weight", Stored("model.lm_head.weight.bin", (vocab_size, hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention(prefix, hidden, num_ranks)
        width = config["intermediate_size"] // num_ranks
        if layer not in config["moe_layers"]:
            yield from _network(f"{prefix}.mlp", f"{prefix}.mlp", hidden, width, expert=0)
            continue
        num_experts = config["num_experts"]
        gate = Stored(f"{prefix}.mlp.moe.gate.wg.weight.bin", (hidden, num_experts), is_turned=True)
        yield f"{prefix}.mlp.gate.weight", gate
        for expert in range(num_experts):
            to = f"{prefix}.mlp.experts.{expert}"
            yield from _network(f"{prefix}.mlp.moe.experts", to, hidden, width, expert)


def _attention(prefix: str, hidden: int, num_ranks: int) -> Iterator[tuple[str, Stored]]:
    own = hidden // num_ranks
    for norm in ("input_layernorm", "post_attention_layernorm"):
        for kind in ("weight", "bias"):
            yield f"{prefix}.{norm}.{kind}", Stored(f"{prefix}.{norm}.{kind}.bin", (hidden,))
    qkv = f"{prefix}.attention.query_key_value"
    for number, name in enumerate(_PROJECTIONS):
        to = f"{prefix}.self_attn.{name}"
        yield f"{to}.weight", Stored(f"{qkv}.weight.{{}}.bin", (hidden, 3, own), 0, number, 1, is_turned=True)
        yield f"{to}.bias", Stored(f"{qkv}.bias.{{}}.bin", (own,), number)
    dense, to = f"{prefix}.attention.dense", f"{prefix}.self_attn.o_proj"
    yield f"{to}.weight", Stored(f"{dense}.weight.{{}}.bin", (own, hidden), is_turned=True)
    yield f"{to}.bias", Stored(f"{dense}.bias.bin", (hidden,))


def _network(stored: str, to: str, hidden: int, width: int, expert: int) -> Iterator[tuple[str, Stored]]:
    up, down = f"{stored}.dense_h_to_4h", f"{stored}.dense_4h_to_h"
    yield f"{to}.up_proj.weight", Stored(f"{up}.weight.{{}}.bin", (hidden, width), expert, None, 1, is_turned=True)
    yield f"{to}.up_proj.bias", Stored(f"{up}.bias.{{}}.bin", (width,), expert)
    yield f"{to}.down_proj.weight", Stored(f"{down}.weight.{{}}.bin", (width, hidden), expert, is_turned=True)
    yield f"{to}.down_proj.bias", Stored(f"{down}.bias.bin", (hidden,), expert)
