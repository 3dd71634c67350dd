"""How many experts stay in memory when a model does not fit into what the user allows. Only headers are looked at."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.experts.cache.policies import DEFAULT_POLICY, POLICIES
from moeflow.experts.predict.registry import DEFAULT_PREDICTOR, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.experts.slot_arena import arena_bytes
from moeflow.models.expert_predictor.saved import check_is_saved, folders_of
from moeflow.planner.choices.lossy_routing import predictor_of
from moeflow.planner.choices.packed_files import place_of_packed_weights
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.resident_experts import min_slots, slots_within
from moeflow.settings.settings import Settings


class ExpertPlan(msgspec.Struct, frozen=True):
    """What a model needs whose experts come from disk."""

    spec: SlabSpec
    packed_weights_file: Path | None  # None: the model has no weights here
    policy: str
    predictor: str
    resident_bytes: int  # weights that stay in memory
    min_slots: int

    @classmethod
    def make(cls, checkpoint: Checkpoint | None, shape: ModelConfig, spec: SlabSpec, settings: Settings) -> ExpertPlan:
        """Look at a model with experts; `checkpoint` None: at its shape alone.

        Raises: ConfigError if there is no such policy or predictor.
        """
        predictor, policy = predictor_of(settings), settings.expert_policy
        predictor = DEFAULT_PREDICTOR if predictor == "auto" else predictor
        known = (*PREDICTORS, WHOLE_PASS, NO_PREDICTOR)
        if predictor not in known:
            raise ConfigError(f"predictor {predictor!r} is unknown; use one of auto, {', '.join(known)}")
        policy = DEFAULT_POLICY if policy == "auto" else policy
        if policy not in POLICIES:
            raise ConfigError(f"expert_policy {policy!r} is unknown; use one of auto, {', '.join(POLICIES)}")
        file = None
        if checkpoint is not None:
            file = place_of_packed_weights(checkpoint, spec, settings.packed_weights_file, settings.cache_dir)
            if predictor == WHOLE_PASS:
                check_is_saved(folders_of(checkpoint.path, file), "choose another --predictor")
        return cls(
            spec,
            file,
            policy,
            predictor,
            spec.resident_bytes,
            min_slots=min_slots(shape.routing.top_k, spec.num_slabs),
        )

    @property
    def min_bytes(self) -> int:
        """What must fit beside process and KV cache."""
        return self.resident_bytes + arena_bytes(self.min_slots, self.spec.slab_bytes)

    def slots(self, left_bytes: int) -> ExpertSlotsConfig:
        """Return the slots that fit into the memory left for experts. Raises: CapacityError."""
        spec = self.spec
        return self.config(slots_within(left_bytes, spec.slab_bytes, spec.num_slabs, least=self.min_slots))

    def config(self, num_slots: int) -> ExpertSlotsConfig:
        """Return so many slots."""
        return ExpertSlotsConfig(
            packed_weights_file=str(self.packed_weights_file or ""),
            num_slots=num_slots,
            slab_bytes=self.spec.slab_bytes,
            min_slots=self.min_slots,
            policy=self.policy,
            predictor=self.predictor,
        )

    def reason(self, config: ExpertSlotsConfig) -> str:
        """Return the decision."""
        number = f"up to {config.num_slots} of {self.spec.num_slabs}"
        held = f"{number} in memory, of {format_bytes(self.spec.slab_bytes)} each; the others come from"
        file = self.packed_weights_file
        if file is None:
            return f"{held} disk"
        made = "is" if file.exists() else "will be"
        return f"{held} {file}, which {made} there ({format_bytes(self.spec.file_bytes)})"


def spec_of_shape(costs: ModelCosts, weights: WeightChoice) -> SlabSpec:
    """Return the sizes of packed weights by a model's shape alone."""
    return SlabSpec(
        identity="",
        weight_format=weights.matrices,
        embedding_format=weights.embeddings,
        num_layers=costs.num_moe_layers,
        num_experts=costs.shape.routing.num_experts,
        slab_bytes=ceil(costs.expert_bytes),
        resident_bytes=ceil(costs.model_bytes - costs.experts_bytes),
        layout="",
    )
