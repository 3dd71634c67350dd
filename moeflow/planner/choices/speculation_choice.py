"""Which speculators an engine has."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import DraftModelConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.planner.choices.draft_model_choice import choose_draft_model, explain
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.settings import Settings
from moeflow.speculation.registry import SPECULATORS


@dataclass(frozen=True, slots=True)
class SpeculatorChoice:
    """What guesses."""

    names: tuple[str, ...] = ()  # each once, in the order given
    draft_models: tuple[DraftModelConfig, ...] = ()  # those of them that are models

    @property
    def num_bytes(self) -> int:
        """What these models take of memory."""
        return sum(draft.num_bytes for draft in self.draft_models)

    def check(self, parallel: ParallelConfig | None) -> None:
        """Raises: ConfigError if one of them cannot guess beside a model that is run so."""
        for draft in self.draft_models:
            if parallel is not None:
                raise ConfigError(
                    f"speculator {draft.name!r} is a model, which ranks (--ranks) do not share: use one rank, or suffix"
                )


def choose_speculators(
    settings: Settings,
    checkpoint: Checkpoint,
    shape: ModelConfig,
    *,
    cpu_isa: str,
    is_offloaded: bool,
    reasons: Reasons,
) -> SpeculatorChoice:
    """Return what guesses. Raises: ConfigError if it is unknown or can be of no use; as `choose_draft_model` does."""
    if settings.speculators and is_offloaded:
        raise ConfigError(
            "speculators (--speculator) work where the CPU computes all layers: leave --device or --speculator away"
        )
    names: list[str] = []
    draft_models: list[DraftModelConfig] = []
    for name in settings.speculators:
        if name in SPECULATORS:
            names.append(name)
        else:
            draft = choose_draft_model(name, settings, checkpoint, shape, cpu_isa=cpu_isa)
            names.append(draft.name)
            draft_models += [] if draft in draft_models else [draft]
    if draft_models:
        reasons.append(("speculators", "; ".join(explain(draft) for draft in draft_models)))
    return SpeculatorChoice(tuple(dict.fromkeys(names)), tuple(draft_models))
