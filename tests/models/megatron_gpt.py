"""Megatron's GPT with DeepSpeed's experts, written out from the papers.

These are 1909.08053 for layers, 2006.16668 and 2101.03961 for routers, and 2201.05596 for DeepSpeed. The oracle
computes with fused, uncut weights by Megatron's own names. `write` cuts them among ranks and saves the files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F

VOCAB, HIDDEN, LAYERS, HEADS, WIDTH, EXPERTS, LENGTH = 96, 32, 4, 4, 48, 4, 128
SIZE = HIDDEN // HEADS
MOE_LAYERS = (1, 3)


@dataclass(frozen=True)
class Choices:
    """What such models and their files differ in."""

    top_k: int = 1
    is_fused: bool = True  # the activation with its bias, which is then approximate
    has_head: bool = False
    version: float | None = None  # None: the file has none
    num_ranks: int = 1
    form: str = "modelscope"  # or "deepspeed", or "megatron", with a folder for each rank
    expert_ranks: str = "cut"  # or "whole" on each rank, or on the "first" alone


class MegatronGPT:
    """Such a model of random weights; called like transformers' models."""

    def __init__(self, choices: Choices) -> None:
        torch.manual_seed(2)
        self.choices = choices
        self.weights: dict[str, torch.Tensor] = {
            "embedding.word_embeddings.weight": torch.randn(VOCAB, HIDDEN) * 0.3,
            "embedding.position_embeddings.weight": torch.randn(LENGTH, HIDDEN) * 0.3,
        }
        for layer in range(LAYERS):
            place = f"encoder.layers.{layer}"
            self._norm_of(f"{place}.input_layernorm")
            self._linear_of(f"{place}.self_attention.query_key_value", HIDDEN, 3 * HIDDEN)
            self._linear_of(f"{place}.self_attention.dense", HIDDEN, HIDDEN)
            self._norm_of(f"{place}.post_attention_layernorm")
            moe = f"{place}.mlp.deepspeed_moe"
            networks = [f"{moe}.experts.deepspeed_experts.{e}" for e in range(EXPERTS)]
            if layer in MOE_LAYERS:
                self.weights[f"{moe}.gate.wg.weight"] = torch.randn(EXPERTS, HIDDEN) * 0.3
            for network in networks if layer in MOE_LAYERS else [f"{place}.mlp"]:
                self._linear_of(f"{network}.dense_h_to_4h", HIDDEN, WIDTH)
                self._linear_of(f"{network}.dense_4h_to_h", WIDTH, HIDDEN)
        self._norm_of("encoder.final_layernorm")
        if choices.has_head:
            self.weights["output_layer.weight"] = torch.randn(VOCAB, HIDDEN) * 0.3

    def __call__(self, token_ids: torch.Tensor) -> SimpleNamespace:
        """Return the logits of sequences. Shapes: [N, T] -> [N, T, V]."""
        return SimpleNamespace(logits=torch.stack([self._logits(ids) for ids in token_ids]))

    def _norm_of(self, name: str) -> None:
        self.weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN)
        self.weights[f"{name}.bias"] = 0.3 * torch.randn(HIDDEN)

    def _linear_of(self, name: str, inputs: int, outputs: int) -> None:
        self.weights[f"{name}.weight"] = torch.randn(outputs, inputs) * 0.2
        self.weights[f"{name}.bias"] = torch.randn(outputs) * 0.2

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.weights["embedding.word_embeddings.weight"]
        hidden = words[ids] + self.weights["embedding.position_embeddings.weight"][: len(ids)]
        for layer in range(LAYERS):
            place = f"encoder.layers.{layer}"
            hidden = hidden + self._attention(f"{place}.self_attention", self._norm(f"{place}.input_layernorm", hidden))
            normed = self._norm(f"{place}.post_attention_layernorm", hidden)
            hidden = hidden + (self._experts if layer in MOE_LAYERS else self._network)(f"{place}.mlp", normed)
        return self._norm("encoder.final_layernorm", hidden) @ self.weights.get("output_layer.weight", words).T

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mixed = self._linear(f"{name}.query_key_value", x)
        version = self.layout_version
        if version == 0:
            q, k, v = mixed.view(len(x), 3, HEADS, SIZE).unbind(1)
        elif version == 1:
            q, k, v = mixed.view(len(x), HEADS, SIZE, 3).unbind(3)
        else:
            q, k, v = mixed.view(len(x), HEADS, 3 * SIZE).split(SIZE, dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE)
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        context = torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -10000.0).softmax(-1), v)
        return self._linear(f"{name}.dense", context.reshape(len(x), HIDDEN))

    def _network(self, name: str, x: torch.Tensor) -> torch.Tensor:
        up = self._linear(f"{name}.dense_h_to_4h", x)
        if self.choices.is_fused:
            units = up * 0.5 * (1.0 + torch.tanh(0.79788456 * up * (1 + 0.044715 * up * up)))
        else:
            units = up * 0.5 * (1.0 + torch.erf(up / math.sqrt(2)))
        return self._linear(f"{name}.dense_4h_to_h", units)

    def _experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.weights[f"{name}.deepspeed_moe.gate.wg.weight"].T
        gates = logits.softmax(-1)
        rows = []
        for token, scores, gate in zip(x, logits, gates, strict=True):
            first = int(scores.argmax())
            chosen = {first: gate[first]}
            if self.choices.top_k == 2:
                second = int(scores.index_fill(0, torch.tensor(first), -math.inf).argmax())
                total = gate[first] + gate[second]
                chosen = {expert: gate[expert] / total for expert in (first, second)}
            place = f"{name}.deepspeed_moe.experts.deepspeed_experts"
            rows.append(sum(weight * self._network(f"{place}.{e}", token) for e, weight in chosen.items()))
        return torch.stack(rows)

    @property
    def layout_version(self) -> float:
        """The order of queries, keys and values: of files without a version, that of their time."""
        given, form = self.choices.version, self.choices.form
        return given if given is not None else 0.0 if form == "megatron" else 3.0

    def part(self, name: str, rank: int) -> torch.Tensor:
        """Return the part of a tensor that a rank has."""
        number, whole = self.choices.num_ranks, self.weights[name]
        if ".experts." in name and self.choices.expert_ranks != "cut":
            return whole
        if "query_key_value" in name and self.layout_version == 0:
            return whole.view(3, number, -1, *whole.shape[1:])[:, rank].flatten(0, 1).clone()
        if any(it in name for it in ("query_key_value", "dense_h_to_4h", "word_embeddings", "output_layer")):
            return whole.chunk(number, dim=0)[rank].clone()
        is_row_parallel = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
        return whole.chunk(number, dim=1)[rank].clone() if is_row_parallel else whole


def arguments(choices: Choices) -> dict[str, object]:
    """Return a training's arguments."""
    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": WIDTH,
        "max_position_embeddings": LENGTH,
        "padded_vocab_size": VOCAB,
        "layernorm_epsilon": 1e-5,
        "bias_gelu_fusion": choices.is_fused,
        "tensor_model_parallel_size": choices.num_ranks,
        "pipeline_model_parallel_size": 1,
        "topk": choices.top_k,
        "num_experts": [EXPERTS],
        "params_dtype": torch.float32,
    }


def nested(flat: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return Megatron's dictionaries in dictionaries: one for each part, with flat names in the encoder."""
    found: dict[str, object] = {"embedding": {}, "transformer": {}}
    for name, tensor in flat.items():
        part, _, rest = name.removeprefix("language_model.").partition(".")
        if part == "embedding":
            found["embedding"][rest.removesuffix(".weight")] = {"weight": tensor}
        else:
            found["transformer"][rest.replace("self_attention", "attention")] = tensor
    return {"language_model": found}


def write(model: MegatronGPT, folder: Path) -> None:
    """Save the files of all ranks."""
    choices = model.choices
    state = {"random_rng_state": random.Random(1).getstate(), "np_rng_state": np.random.RandomState(1).get_state()}
    (folder / "config.json").unlink(missing_ok=True)
    for rank in range(choices.num_ranks):
        parts = {f"language_model.{name}": model.part(name, rank) for name in model.weights}
        more = {"iteration": 7, "rng_state": [state]} | (
            {} if choices.version is None else {"checkpoint_version": choices.version}
        )
        if choices.form == "megatron":
            (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
            place = folder / "iter_0000007" / f"mp_rank_{rank:02}"
            place.mkdir(parents=True)
            args = argparse.Namespace(**arguments(choices))
            torch.save({"args": args, "model": nested(parts), **more}, place / "model_rng.pt")
            continue
        place = folder
        if choices.form == "modelscope":
            place = folder / "model"
            place.mkdir(exist_ok=True)
            config = arguments(choices) | {
                "model_type": "gpt-moe",
                "num_hidden_layers": LAYERS,
                "eod_id": 7,
                "top_k": 5,
            }
            del config["params_dtype"], config["num_layers"], config["topk"]
            (folder / "config.json").write_text(json.dumps(config))
        else:
            more["args"] = argparse.Namespace(**arguments(choices))
        of_experts = {name for name in parts if ".experts." in name}
        main = {name: tensor for name, tensor in parts.items() if name not in of_experts}
        torch.save({"module": main, **more}, place / f"mp_rank_{rank:02}_model_states.pt")
        if choices.expert_ranks == "first" and rank:
            continue
        for number, layer in enumerate(MOE_LAYERS):
            for expert in range(EXPERTS):
                start = f"language_model.encoder.layers.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{expert}."
                own = {name: parts[name] for name in of_experts if name.startswith(start)}
                torch.save(own, place / f"layer_{number}_expert_{expert}_mp_rank_{rank:02}_model_states.pt")
