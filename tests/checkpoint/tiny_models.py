"""Tiny checkpoints of every family, written by others' code (gguf's writer) or by the formats' definitions."""

from __future__ import annotations

import json
import string
import struct
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

VOCAB, HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, EXPERTS, TOP_K = 48, 64, 32, 2, 4, 2, 4, 2
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": SHAPE | {"model_type": "llama", "intermediate_size": WIDTH},
    "mixtral": SHAPE
    | {
        "model_type": "mixtral",
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "sliding_window": None,
    },
    "qwen3_moe": SHAPE
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "olmoe": SHAPE
    | {
        "model_type": "olmoe",
        "intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    "gpt_oss": SHAPE
    | {
        "model_type": "gpt_oss",
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "sliding_window": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "gemma3_text": SHAPE
    | {
        "model_type": "gemma3_text",
        "intermediate_size": WIDTH,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 500.0,
        "query_pre_attn_scalar": HIDDEN // HEADS,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "granitemoeshared": SHAPE
    | {
        "model_type": "granitemoeshared",
        "intermediate_size": WIDTH,
        "shared_intermediate_size": 96,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.5,
        "logits_scaling": 6.0,
    },
}
GGUF_NAMES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "granitemoeshared": "granitemoe",
}
TOKENS = ["<unk>", "<s>", "</s>", "é", "▁", *string.ascii_lowercase, *string.ascii_uppercase[: VOCAB - 31]]
IN_PAIRS = ("llama", "granitemoe")


def random_weights(family: str, *, tied: bool = False, bias: bool = False) -> dict[str, torch.Tensor]:
    """Return random weights under the names that the family has on the hub."""
    head_dim = HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", HEADS * head_dim), ("k", KV_HEADS * head_dim), ("v", KV_HEADS * head_dim)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
        if family == "gpt_oss":
            shapes[f"{prefix}self_attn.sinks"] = (HEADS,)
        if family == "gemma3_text":
            shapes |= {f"{prefix}{it}_feedforward_layernorm.weight": (HIDDEN,) for it in ("pre", "post")}
        if family in ("qwen3_moe", "olmoe", "gemma3_text"):
            is_whole = family == "olmoe"  # olmoe normalizes over all heads
            shapes[f"{prefix}self_attn.q_norm.weight"] = (HIDDEN if is_whole else head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (KV_HEADS * head_dim if is_whole else head_dim,)
        shapes |= _ffn_shapes(family, prefix)
    generator = torch.Generator().manual_seed(len(shapes))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _ffn_shapes(family: str, prefix: str) -> dict[str, tuple[int, ...]]:
    wide, narrow = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    if family in ("llama", "gemma3_text"):
        return {
            f"{prefix}mlp.{part}_proj.weight": narrow if part == "down" else wide for part in ("gate", "up", "down")
        }
    block, parts = (
        ("block_sparse_moe", {"w1": wide, "w3": wide, "w2": narrow})
        if family == "mixtral"
        else ("mlp", {"gate_proj": wide, "up_proj": wide, "down_proj": narrow})
    )
    block = "block_sparse_moe" if family == "granitemoeshared" else block
    router = {"gpt_oss": "router", "granitemoeshared": "router.layer"}.get(family, "gate")
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{block}.{router}.weight": (EXPERTS, HIDDEN)}
    if family == "gpt_oss":
        shapes[f"{prefix}{block}.router.bias"] = (EXPERTS,)
    if family == "granitemoeshared":
        shapes |= {f"{prefix}shared_mlp.{part}_proj.weight": (96, HIDDEN) for part in ("gate", "up")}
        shapes[f"{prefix}shared_mlp.down_proj.weight"] = (HIDDEN, 96)
    for expert in range(EXPERTS):
        own = f"{prefix}{block}.experts.{expert}"
        shapes |= {f"{own}.{part}.weight": shape for part, shape in parts.items()}
        if family == "gpt_oss":
            shapes |= {f"{own}.{part}.bias": shape[:1] for part, shape in parts.items()}
    return shapes


def write_safetensors(file: Path, tensors: dict[str, torch.Tensor], **header: object) -> None:
    """Write a file by the format's definition; `header` entries are added or replace what belongs there."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    encoded = json.dumps(entries | header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None, num_shards: int = 1
) -> Path:
    """Write a Hugging Face folder, sharded with an index if `num_shards` is above 1."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"] if config is None else config))
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::num_shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def gguf_writer(file: Path, family: str, *, skip: tuple[str, ...] = (), **parts: int) -> gguf.GGUFWriter:
    """Return gguf's own writer with the metadata that the family needs, but for the setters in `skip`.

    `parts` are the writer's arguments that have it write several files.
    """
    writer = gguf.GGUFWriter(file, GGUF_NAMES[family], **parts)
    values = {
        "add_context_length": 128,
        "add_embedding_length": HIDDEN,
        "add_block_count": LAYERS,
        "add_feed_forward_length": CONFIGS[family]["intermediate_size"],
        "add_head_count": HEADS,
        "add_head_count_kv": KV_HEADS,
        "add_key_length": HIDDEN // HEADS,
        "add_layer_norm_rms_eps": 1e-5,
        "add_rope_freq_base": 100000.0,
        "add_vocab_size": VOCAB,
        "add_bos_token_id": 1,
        "add_eos_token_id": 2,
    }
    if family not in ("llama", "gemma3_text"):
        values |= {"add_expert_count": EXPERTS, "add_expert_used_count": TOP_K}
    if family in ("qwen3_moe", "gpt_oss"):
        values |= {"add_expert_feed_forward_length": WIDTH}
    if family == "gpt_oss":
        scaling = CONFIGS[family]["rope_scaling"]
        values |= {
            "add_sliding_window": CONFIGS[family]["sliding_window"],
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": scaling["factor"],
            "add_rope_scaling_orig_ctx_len": scaling["original_max_position_embeddings"],
        }
    if family == "gemma3_text":
        values |= {
            "add_sliding_window": CONFIGS[family]["sliding_window"],
            "add_rope_freq_base_swa": 500.0,
            "add_final_logit_softcapping": 30.0,
        }
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    if family == "granitemoeshared":
        values |= {
            "add_expert_shared_feed_forward_length": 96,
            "add_embedding_scale": 12.0,
            "add_residual_scale": 0.25,
            "add_attention_scale": 0.5,
            "add_logit_scale": 6.0,
        }
    for setter, value in values.items():
        if setter not in skip:
            getattr(writer, setter)(value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(number) for number in range(VOCAB)])
    writer.add_token_types(
        [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (VOCAB - 3)
    )
    writer.add_add_bos_token(True)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    file: Path,
    family: str,
    tensors: dict[str, torch.Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    routers: GGMLQuantizationType | None = None,
    **parts: int,
) -> Path:
    """Write the model as llama.cpp's conversion does: gguf's names, stacked experts, q and k in pairs.

    Routers are of the same kind as other matrices unless another is named; `parts` as in `gguf_writer`.
    """
    writer = gguf_writer(file, family, **parts)
    architecture = next(item for item, name in gguf.MODEL_ARCH_NAMES.items() if name == GGUF_NAMES[family])
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    for name, tensor in _stacked(tensors).items():
        if family == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if GGUF_NAMES[family] in IN_PAIRS and "q_proj" in name:
            tensor = _permute(tensor, HEADS)
        if GGUF_NAMES[family] in IN_PAIRS and "k_proj" in name:
            tensor = _permute(tensor, KV_HEADS)
        known = name
        if family == "granitemoeshared":  # whose conversion names networks itself
            known = name.replace("shared_mlp.", "mlp.shared_expert.").replace("block_sparse_moe.experts", "mlp.experts")
        gguf_name = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        gguf_name += ".weight" if name.endswith("sinks") else ""  # as llama.cpp's conversion does
        own = routers if routers is not None and "ffn_gate_inp" in gguf_name else kind
        is_plain = tensor.ndim == 1 or gguf_name.endswith(".bias")
        add_gguf_tensor(writer, gguf_name, tensor, GGMLQuantizationType.F32 if is_plain else own)
    finish(writer)
    return file


def add_gguf_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: GGMLQuantizationType = GGMLQuantizationType.F32
) -> None:
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), kind), raw_dtype=kind)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, tail = name.partition(".experts.")
        stacks.setdefault(f"{head}.experts.{tail.partition('.')[2]}" if tail else name, []).append(tensor)
    return {name: torch.stack(parts) if ".experts." in name else parts[0] for name, parts in stacks.items()}


def _permute(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's `permute` in its conversion of Hugging Face's Llama models."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)
