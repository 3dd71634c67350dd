"""Layers of Qwen3-30B-A3B's shape with random weights, and the least time that they can take."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from moeflow.core.units import GIB, MIB
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.gpu_check.resident.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE: Final = 48  # of Qwen3-30B-A3B
_VALUE_BYTES: Final = 2


class LayerShape(NamedTuple):
    """Sizes of a layer."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    num_experts: int
    top_k: int

    @property
    def dense_params(self) -> int:
        """Weights of a layer outside its experts."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + self.hidden * self.num_experts

    @property
    def expert_params(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.width

    def read_bytes(self, batch: int, context: int) -> float:
        """Return what a decode pass must read in a layer: dense weights, K and V, and chosen experts once.

        Random routers choose uniformly, so this expects as many different experts as uniform choices have.
        """
        share = 1.0 - (1.0 - self.top_k / self.num_experts) ** batch
        weights = self.dense_params + share * self.num_experts * self.expert_params
        return _VALUE_BYTES * (weights + batch * context * 2 * self.kv_heads * self.head_dim)

    @property
    def logit_bytes(self) -> int:
        """Return what a pass must read outside its layers: the weights of the logits."""
        return _VALUE_BYTES * self.vocab * self.hidden

    def prompt_flops(self, num_tokens: int) -> float:
        """Return the operations of a prompt in a layer."""
        products = 2.0 * (self.dense_params + self.top_k * self.expert_params)
        attention = 2.0 * num_tokens * self.heads * self.head_dim  # over half of the prompt: scores and sums
        return num_tokens * (products + attention)


def layer_counts(target: Target) -> tuple[int, int]:
    """Return the layers of two models: their difference is the time of a layer."""
    return (1, 2) if target.is_rehearsal else (2, 8)


def shape_of(target: Target) -> LayerShape:
    """Return the sizes to use."""
    if target.is_rehearsal:
        return LayerShape(512, 64, 4, 2, 16, 32, 16, 4)
    return LayerShape(32000, 2048, 32, 4, 128, 768, 128, 8)


def build(target: Target, num_layers: int) -> PreTrainedModel:
    """Return a random model by transformers, on the device."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # takes seconds to import

    shape = shape_of(target)
    config = CONFIG_MAPPING["qwen3_moe"](
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=3 * shape.hidden,
        moe_intermediate_size=shape.width,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with target.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def folder_of(target: Target, scratch: Path, num_layers: int, model: PreTrainedModel | None = None) -> Path:
    """Return the folder of a model, which is written on first use."""
    folder = scratch / f"layers-{num_layers}"
    if not (folder / "tokenizer.json").exists():
        from tests.tiny_mixtral import write_byte_tokenizer  # likewise

        (model or build(target, num_layers)).save_pretrained(folder)
        write_byte_tokenizer(folder, shape_of(target).vocab)
        free(target)
    return folder


def load(target: Target, folder: Path, *, max_num_seqs: int, max_tokens: int, quantize: str | None = None) -> Engine:
    """Return an engine with a model, for contexts and passes of at most so many tokens."""
    settings = settings_for(target, str(folder), max_num_seqs=max_num_seqs, max_tokens=max_tokens, quantize=quantize)
    return Engine.load(resolve(settings).config)


def settings_for(
    target: Target,
    folder: str,
    *,
    device: str = "",
    max_num_seqs: int,
    max_tokens: int,
    quantize: str | None = None,
) -> Settings:
    """Return the settings of such an engine; `device`: another one than the target's."""
    return Settings(
        model=folder,
        device=device or target.engine_device,
        dtype="bfloat16",
        quantize=quantize,
        max_model_len=max_tokens,
        kv_cache_bytes=8 * MIB if target.is_rehearsal else 2 * GIB,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
    )


def free(target: Target) -> None:
    """Return memory of models that are used no more."""
    gc.collect()
    if not target.is_rehearsal:
        torch.cuda.empty_cache()


def extrapolated(times: dict[int, float]) -> float:
    """Return the time of all layers of the real model, from those of two models with fewer layers."""
    (few, more) = sorted(times)
    return times[few] + (times[more] - times[few]) / (more - few) * (WHOLE - few)


def prompt_ids(target: Target, seed: int, length: int) -> list[int]:
    """Return a prompt that shares no beginning with those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = torch.randint(2, shape_of(target).vocab - 2, (length,), generator=generator).tolist()
    return found
