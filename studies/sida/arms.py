"""The ways to have experts at hand that are compared, and engines that classify texts in each.

All run on the same kernels, disk and slots, so that the ways alone differ. Ways that stream whole layers are the
paper's baselines. On-demand loading is the fair one: it reads only experts that routers chose, without a prediction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.core.engine_messages import NO_TOKENS, Submission
from moeflow.core.errors import EngineError
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.pooling_choice import classification
from moeflow.engine.runner_loading import load_runner
from moeflow.experts.cached_experts import CachedExperts
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM


@dataclass(frozen=True, slots=True)
class Way:
    """How experts come from disk."""

    name: str
    policy: str  # of eviction
    predictor: str = "none"
    experts: type[CachedExperts] = CachedExperts
    is_lossy: bool = False  # the predictor chooses in the place of routers


class WholeLayers(CachedExperts):
    """Has all experts of a layer come, whatever its router chooses; those of the next layer while it computes."""

    def needed(self, topk_ids: Tensor) -> list[int]:
        """See `CachedExperts.needed`."""
        return list(range(self.pool.cache.num_experts))


class WholeLayersInTurn(WholeLayers):
    """The same, but a layer's reads begin with it."""

    def streams(self, num_needed: int) -> bool:
        """See `CachedExperts.streams`."""
        return False


TURN: Final = 10  # texts that one way classifies before another does
RESIDENT: Final = "all resident"
ON_DEMAND: Final = "on demand"  # the beginning of the names of ways that fetch an expert when a router chooses it
LAYER_BY_LAYER: Final = "layer by layer"
LAYERS_AHEAD: Final = "layers ahead"
PREDICTED: Final = "predicted"
LOSSY: Final = "predicted, lossy"
WAYS: Final = (
    Way(ON_DEMAND, "fifo"),
    *(Way(f"{ON_DEMAND}, {policy}", policy) for policy in ("lru", "lfu", "next-use")),
    Way(PREDICTED, "next-use", "sida"),
    Way(LOSSY, "fifo", "sida", is_lossy=True),  # as published
    Way(LAYER_BY_LAYER, "fifo", experts=WholeLayersInTurn),  # "Standard" of the paper
    Way(LAYERS_AHEAD, "fifo", experts=WholeLayers),  # as DeepSpeed streams weights
)


def config_of(way: Way, resident: EngineConfig, experts: ExpertSlotsConfig, *, lossy_top_k: int) -> EngineConfig:
    """Return the configuration of an engine whose experts come in some way to `experts`' slots."""
    slots = replace(experts, policy=way.policy, predictor=way.predictor)
    return replace(resident, experts=slots, lossy_top_k=lossy_top_k if way.is_lossy else 0)


class Arm:
    """An engine that classifies texts one by one."""

    def __init__(self, name: str, config: EngineConfig, experts: type[CachedExperts] = CachedExperts) -> None:
        """Load the model. Raises: as `load_runner`."""
        self.name = name
        self.runner: ModelRunner = load_runner(config)
        self.engine = Engine.over(config, self.runner)
        self.answers: list[bytes] = []  # float32 probabilities of the classes
        self.seconds: list[float] = []  # of each text since counting began
        model = self.runner.model
        assert isinstance(model, EncoderDecoderLM), "classifiers are encoders"
        self.model = model
        for _, block in model.moe_blocks():
            if isinstance(block.weights, CachedExperts):
                block.weights = experts(block.weights.pool, block.weights.layer)

    def classify(self, texts: Sequence[list[int]]) -> None:
        """Classify some texts, one in a pass; all are waiting before the first is computed. Raises: EngineError."""
        pooling = classification(self.engine.model)
        for number, text in enumerate(texts, len(self.answers)):
            self.engine.submit(Submission(str(number), text, NO_TOKENS, seed=0, pooling=pooling))
        began_s = time.perf_counter()
        while self.engine.has_work:
            for output in self.engine.step():
                if output.embedding is None:
                    raise EngineError(f"a text was not classified: {output.error}")
                self.answers.append(output.embedding)
                ended_s = time.perf_counter()
                self.seconds.append(ended_s - began_s)
                began_s = ended_s

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
