"""Hugging Face's names for GGUF's tensors.

GGUF stacks a layer's experts in one tensor; Hugging Face names each of them. The `llama` architecture stores
the rows of q and k in pairs (2i, 2i+1) of one rotation; Hugging Face in halves (i, i + D/2). The needed tensors are not
known here: the model's loader finds missing and unexpected ones.

Source: llama.cpp's conversion (`permute`, `ffn_*_exps`) and its table of rotary types: `qwen3moe` and
`olmoe` keep Hugging Face's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # LFM2's last one
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WITHOUT_SUFFIX = {"attn_sinks": "self_attn.sinks"}
_TENSOR_IN_LAYER = re.compile(
    r"blk\.(0|[1-9][0-9]{0,5})\.((?:nextn\.|shortconv\.)?[a-z][a-z0-9_]*)(?:\.(weight|bias|scale))?"
)


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What a Hugging Face family calls its experts."""

    count: str  # their number, in config.json
    block: str
    gate: str  # of one expert, as are the next two
    up: str
    down: str
    router: str = "gate"
    shared: str = ""  # the shared expert, below the layer; empty: there is none
    shared_gate: str = ""  # likewise
    choice_bias: str = ""  # of the router's choice, likewise
    single_rows: frozenset[str] = frozenset()  # what Hugging Face has as a matrix of one row, by GGUF's names

    def expert(self, matrix: str) -> str:
        """Return what an expert's matrix is called below the layer, `{}` where the expert's number goes."""
        return f"{self.block}.experts.{{}}.{matrix}"


MIXTRAL_NAMES = MoeNames("num_local_experts", "block_sparse_moe", gate="w1", up="w3", down="w2")
MLP_NAMES = MoeNames("num_experts", "mlp", gate="gate_proj", up="up_proj", down="down_proj")
QWEN2_NAMES = replace(
    MLP_NAMES,
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    single_rows=frozenset({"ffn_gate_inp_shexp"}),
)
ROUTED_NAMES = replace(
    MLP_NAMES, count="n_routed_experts", shared="mlp.shared_experts", choice_bias="mlp.gate.e_score_correction_bias"
)
ERNIE_NAMES = replace(
    ROUTED_NAMES,
    count="moe_num_experts",
    choice_bias="mlp.moe_statics.e_score_correction_bias",
    single_rows=frozenset({"exp_probs_b"}),
)
MINIMAX_NAMES = replace(MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias")
HUNYUAN_NAMES = replace(MLP_NAMES, router="gate.wg", shared="mlp.shared_mlp")
GRANITE_NAMES = replace(
    MLP_NAMES, count="num_local_experts", block="block_sparse_moe", router="router.layer", shared="shared_mlp"
)
GEMMA4_NAMES = replace(MLP_NAMES, block="moe", router="router.proj")
GPT_OSS_NAMES = replace(MLP_NAMES, count="num_local_experts", router="router")


def huggingface_name(gguf_name: str, moe: MoeNames | None, own: Mapping[str, str]) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, None if it is unknown.

    A stack of experts has `{}` where the expert's number goes, and `+` between the names of several matrices of an
    expert; `moe` is None in dense models. `own` are names in layers
    that this architecture alone has: of parts that have weights and biases, or of single tensors, as they are.
    """
    if gguf_name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[gguf_name]
    match = _TENSOR_IN_LAYER.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    whole = part if suffix is None else f"{part}.{suffix}"
    if suffix in (None, "scale") or whole in own:
        return f"model.layers.{layer}.{own[whole]}" if whole in own else None
    if part in _WITHOUT_SUFFIX:
        return f"model.layers.{layer}.{_WITHOUT_SUFFIX[part]}" if suffix == "weight" else None
    if part == "exp_probs_b":
        return f"model.layers.{layer}.{moe.choice_bias}" if moe and moe.choice_bias and suffix == "bias" else None
    if part.startswith("nextn."):  # of layers that predict further tokens, behind the last one
        return f"model.layers.{layer}.{part}.{suffix}"
    if moe and part == "ffn_gate_up_exps":
        return "+".join(f"model.layers.{layer}.{moe.expert(matrix)}.{suffix}" for matrix in (moe.gate, moe.up))
    name = own.get(part) or _IN_LAYER.get(part) or (_moe_parts(moe).get(part) if moe else None)
    return f"model.layers.{layer}.{name}.{suffix}" if name else None


def _moe_parts(moe: MoeNames) -> dict[str, str]:
    shared = {f"ffn_{name}_shexp": f"{moe.shared}.{name}_proj" for name in ("gate", "up", "down") if moe.shared}
    return shared | {
        "ffn_gate_inp_shexp": moe.shared_gate,
        "ffn_gate_inp": f"{moe.block}.{moe.router}",
        "ffn_gate_exps": moe.expert(moe.gate),
        "ffn_up_exps": moe.expert(moe.up),
        "ffn_down_exps": moe.expert(moe.down),
    }


def cut_names(gguf_name: str, names: Sequence[str]) -> list[str]:
    """Return the whole names of what a tensor in a layer is cut into, from those below the layer."""
    match = _TENSOR_IN_LAYER.fullmatch(gguf_name)
    assert match is not None, gguf_name
    return [f"model.layers.{match[1]}.{name}.{match[3]}" for name in names]


def part_of(gguf_name: str) -> str:
    """Return what a tensor in a layer is called there, without its suffix; empty: it is in no layer."""
    match = _TENSOR_IN_LAYER.fullmatch(gguf_name)
    return match[2] if match else ""


def is_single_row(gguf_name: str, moe: MoeNames | None) -> bool:
    """Return whether what GGUF has as a vector is a matrix of one row."""
    return moe is not None and part_of(gguf_name) in moe.single_rows


def heads_in_pairs(gguf_name: str, num_heads: int, num_kv_heads: int) -> int:
    """Return how many heads' rows a tensor of the `llama` architecture stores in pairs; 0 if none."""
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part_of(gguf_name), 0)
