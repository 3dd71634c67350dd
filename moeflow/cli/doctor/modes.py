"""How else a model could run here than the user's options say: in fewer bits, or within less memory; and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeflow.cli import lazy
from moeflow.cli.doctor.diagnostics import Finding, Verdict
from moeflow.cli.plan.plan_option import plan_of
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import MoeflowError
from moeflow.core.hardware import RAM
from moeflow.core.plan import Plan
from moeflow.core.units import MIB
from moeflow.kernels.weight_format import SUGGESTED_FORMATS
from moeflow.planner.usage import SERVING


def other_modes(overrides: Mapping[str, Any], plan: Plan | None) -> list[Finding]:
    """Return what to expect with other options that are possible; `plan` is without them, None: it does not fit."""
    found = []
    for option, changed in _variants(overrides, plan):
        try:
            other = plan_of({**overrides, **changed}, SERVING)
        except MoeflowError:  # unsupported by this model or on this machine
            continue
        if other.forecast is not None:
            found.append(Finding("or with", Verdict.OK, f"{option}: {lazy.speed_and_memory(other)}"))
    return found


def _variants(overrides: Mapping[str, Any], plan: Plan | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options that the user did not set, as text, with their effects."""
    if plan is not None and not _runs_on_kernels(plan.config):
        return
    if overrides.get("quantize") is None:
        yield from ((f"--quantize {name}", {"quantize": name}) for name in SUGGESTED_FORMATS)
    if overrides.get("memory_bytes") is None and plan is not None and plan.forecast is not None:
        peak = next(it.peak_bytes.value for it in plan.forecast.memory if it.tier == RAM)
        half = int(peak / 2) // MIB
        yield f"--memory {half}MiB", {"memory_bytes": half * MIB}


def _runs_on_kernels(config: EngineConfig) -> bool:
    return config.offload is None and bool(config.cpu_isa)
