"""Which speculators an engine has."""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import DraftModelConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.trained_speculators import trained_speculators
from moeflow.planner.hardware.host import host_resources
from moeflow.settings.settings import Settings
from moeflow.speculation.registry import SPECULATORS
from moeflow.speculation.suffix import SuffixSpeculator

with on_demand(__name__):
    from moeflow.planner.choices import draft_model_choice

AUTO: Final = "auto"
AUTO_SHARE: Final = 0.1  # of memory, for draft models that the user did not name


class SpeculatorChoice(msgspec.Struct, frozen=True):
    """What drafts."""

    names: tuple[str, ...] = ()  # each once, in the order given
    draft_models: tuple[DraftModelConfig, ...] = ()  # those of them that are models

    @property
    def num_bytes(self) -> int:
        """What these models take of memory."""
        return sum(draft.num_bytes for draft in self.draft_models)

    def check(self, parallel: ParallelConfig | None) -> None:
        """Raises: ConfigError if one of them cannot draft for a model that is run so."""
        for draft in self.draft_models:
            if draft.is_early_exit and parallel is not None:
                raise ConfigError(
                    f"speculator {draft.name!r} needs whole layers, which ranks (--ranks, --stages) do not have: "
                    "use one rank, or a model of its own"
                )


def choose_speculators(
    settings: Settings,
    checkpoint: Checkpoint,
    shape: ModelConfig,
    *,
    cpu_isa: str,
    is_offloaded: bool,
    on_gpu: bool,
    reasons: Reasons,
) -> SpeculatorChoice:
    """Return the speculators; none where a pipeline brings a device the layers.

    A GPU has only the named ones: "auto" is for the CPU, since passes with drafts are no CUDA graphs.

    Raises: ConfigError if one is unknown or can be of no use; as `choose_draft_model`.
    """
    if settings.speculators and is_offloaded:
        reasons.append(("speculators", "none: drafts are for models whose layers the CPU computes"))
        return SpeculatorChoice()
    if on_gpu and settings.speculators == (AUTO,):
        reasons.append(("speculators", "none: on a GPU they have to be named (--speculator suffix)"))
        return SpeculatorChoice()
    names: list[str] = []
    draft_models: list[DraftModelConfig] = []
    for name in _expanded(settings, checkpoint, shape, cpu_isa, reasons):
        if name in SPECULATORS:
            names.append(name)
        else:
            draft = draft_model_choice.choose_draft_model(name, settings, checkpoint, shape, cpu_isa=cpu_isa)
            names.append(draft.name)
            draft_models += [] if draft in draft_models else [draft]
    if draft_models:
        reasons.append(("speculators", "; ".join(draft_model_choice.explain(draft) for draft in draft_models)))
    return SpeculatorChoice(tuple(dict.fromkeys(names)), tuple(draft_models))


def _expanded(
    settings: Settings, checkpoint: Checkpoint, shape: ModelConfig, cpu_isa: str, reasons: Reasons
) -> list[str]:
    """Return the set names. "auto" stands for suffix and the trained speculators that fit in memory."""
    if AUTO not in settings.speculators:
        return list(settings.speculators)
    found, why = _automatic(settings, checkpoint, shape, cpu_isa)
    reasons.append((f"speculators ({AUTO})", why))
    return [each for name in settings.speculators for each in (found if name == AUTO else [name])]


def _automatic(settings: Settings, checkpoint: Checkpoint, shape: ModelConfig, cpu_isa: str) -> tuple[list[str], str]:
    """Return the default speculators and the reason. The governor chooses among them."""
    suffix = SuffixSpeculator.name
    trained = trained_speculators(checkpoint.path)
    if not trained:
        return [suffix], f"{suffix}; nothing was trained for this model (moeflow train speculator)"
    room_bytes = int((settings.memory_bytes or host_resources().available_bytes) * AUTO_SHARE)
    taken: list[str] = []
    for folder in trained:
        draft = draft_model_choice.choose_draft_model(str(folder), settings, checkpoint, shape, cpu_isa=cpu_isa)
        if draft.num_bytes > room_bytes:
            break  # each was trained for where those before it are wrong
        room_bytes -= draft.num_bytes
        taken.append(str(folder))
    limit = f"{len(taken)} of {len(trained)} trained for this model fit in {AUTO_SHARE:.0%} of memory"
    return [suffix, *taken], f"{suffix}, and {limit}"
