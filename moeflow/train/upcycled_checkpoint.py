"""Sparse upcycling: a dense Llama-architecture checkpoint becomes a Mixtral-architecture one.

Every expert is a copy of the dense feed-forward network with a small Gaussian perturbation or a trained change. All
other tensors are copied. Tensors are made while they are written: memory holds one layer's dense matrices.
Source: Komatsuzaki et al., "Sparse Upcycling", arXiv 2212.05055.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.safetensors.writer import Shapes, write_json, write_safetensors
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.train.decoder_config import decoder_config
from moeflow.train.upcycle_recipe import UpcycleRecipe

_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's name: Llama's name
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_AHEAD = 4  # tensors made before the one to write
_MIXTRAL_ONLY = "Mixtral lacks it; choose a model without it"


class ExpertMatrix(NamedTuple):
    """One matrix of one expert."""

    layer: int
    expert: int
    number: int  # in the order of `_MATRICES`

    @property
    def name(self) -> str:
        """Llama's name of the dense matrix."""
        return list(_MATRICES.values())[self.number]


# dense weight [out, in] float32 and the place of an expert's matrix -> that matrix in bf16
MakeExpert = Callable[[np.ndarray, ExpertMatrix], torch.Tensor]


def check_source(checkpoint: Checkpoint) -> None:
    """Raises: CheckpointError if a checkpoint is a mixture of experts already, or no plain Llama."""
    config = ConfigReader(checkpoint.config, checkpoint.config_file)
    model_type = config.get(str, "model_type")
    if any(key in checkpoint.config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise _unfit(checkpoint, f"{model_type} is a mixture of experts already", "Upcycling starts from a dense model")
    if model_type != "llama":
        raise _unfit(checkpoint, f"the architecture is {model_type}, not llama", "Only Llama models can be upcycled")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(bool, key, False):
            raise _unfit(checkpoint, f"{key} is on", _MIXTRAL_ONLY)


def mixtral_shapes(checkpoint: Checkpoint, shape: ModelConfig, recipe: UpcycleRecipe) -> Shapes:
    """Return names and shapes of the new model's tensors, in the order of writing.

    Raises: CheckpointError if the source lacks a tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for target in _targets(shape, recipe):
        if target.source is None:
            shapes[target.name] = (recipe.num_experts, shape.hidden_size)
            continue
        if target.source not in checkpoint.tensors:
            raise CheckpointError(
                "this tensor is missing", file=checkpoint.path, tensor=target.source, remedy="Download the model again"
            )
        shapes[target.name] = checkpoint.tensors[target.source].shape
    return shapes


def write_mixtral(
    checkpoint: Checkpoint,
    shape: ModelConfig,
    routers: Sequence[torch.Tensor],
    recipe: UpcycleRecipe,
    folder: Path,
    *,
    make_expert: MakeExpert | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """Write config, generation config and weights of the upcycled model into `folder`.

    `shape` is the source's. Without `make_expert`, experts are noisy copies. Shapes: routers, one per layer, [E, H].
    """
    config = _config(checkpoint, shape, recipe)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", _generation_config(checkpoint.generation_config, config))
    shapes = mixtral_shapes(checkpoint, shape, recipe)
    tensors = _tensors(checkpoint, shape, routers, recipe, make_expert or _noisy(recipe))
    write_safetensors(folder, shapes, tensors, on_bytes=on_bytes)


def _config(checkpoint: Checkpoint, shape: ModelConfig, recipe: UpcycleRecipe) -> dict[str, Any]:
    """Return `config.json`, with every size, since Mixtral's defaults differ from Llama's."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **decoder_config(checkpoint, shape),
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        "sliding_window": shape.attention.sliding_window,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the new model and its source."""

    name: str
    source: str | None  # dense tensor; None: the layer's router
    layer: int = 0
    place: ExpertMatrix | None = None  # None: copied unchanged


def _targets(shape: ModelConfig, recipe: UpcycleRecipe) -> Iterator[_Target]:
    yield _carried("model.embed_tokens.weight")
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield _carried(f"{prefix}.input_layernorm.weight")
        for name in _ATTENTION:
            yield _carried(f"{prefix}.self_attn.{name}.weight")
        yield _carried(f"{prefix}.post_attention_layernorm.weight")
        block = f"{prefix}.block_sparse_moe"
        yield _Target(f"{block}.gate.weight", None, layer)
        for expert in range(recipe.num_experts):
            for matrix, (name, dense_name) in enumerate(_MATRICES.items()):
                source, place = f"{prefix}.mlp.{dense_name}.weight", ExpertMatrix(layer, expert, matrix)
                yield _Target(f"{block}.experts.{expert}.{name}.weight", source, layer, place)
    yield _carried("model.norm.weight")
    if not shape.embeddings.tie_word_embeddings:
        yield _carried("lm_head.weight")


def _carried(name: str) -> _Target:
    return _Target(name, name)


def _tensors(
    checkpoint: Checkpoint,
    shape: ModelConfig,
    routers: Sequence[torch.Tensor],
    recipe: UpcycleRecipe,
    make_expert: MakeExpert,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make the tensors in order, a few ahead in threads: random numbers take most time, and release the GIL."""

    @lru_cache(maxsize=len(_MATRICES))
    def dense(name: str) -> np.ndarray:
        return checkpoint.read(name).float().contiguous().numpy()

    def make(pool: ThreadPoolExecutor, target: _Target) -> Future[torch.Tensor]:
        if target.source is None:
            return pool.submit(routers[target.layer].to, torch.bfloat16)
        if target.place is None:
            return pool.submit(checkpoint.read(target.source).to, torch.bfloat16)
        return pool.submit(make_expert, dense(target.source), target.place)

    with ThreadPoolExecutor(max_workers=2) as pool:
        ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
        for target in _targets(shape, recipe):
            ahead.append((target.name, make(pool, target)))
            if len(ahead) > _AHEAD:
                name, future = ahead.popleft()
                yield name, future.result()
        for name, future in ahead:
            yield name, future.result()


def _noisy(recipe: UpcycleRecipe) -> MakeExpert:
    """Return a function that adds noise. The noise depends on seed and place alone."""

    def perturbed(weight: np.ndarray, place: ExpertMatrix) -> torch.Tensor:
        generator = np.random.Generator(np.random.SFC64((recipe.seed, *place)))
        noise = generator.standard_normal(weight.shape, dtype=np.float32)
        noise *= np.float32(recipe.perturbation * float(weight.std(dtype=np.float64)))
        noise += weight
        return torch.from_numpy(noise).to(torch.bfloat16)

    return perturbed


def _generation_config(source: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return {**token_ids, **source}


def _unfit(checkpoint: Checkpoint, problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(problem, file=checkpoint.config_file, remedy=remedy)
