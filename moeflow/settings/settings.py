"""All settings of an engine: the values that the user set before anything is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.settings.batching import BatchingSettings
from moeflow.settings.device import DeviceSettings
from moeflow.settings.diagnostics import DiagnosticSettings
from moeflow.settings.experts import ExpertSettings
from moeflow.settings.memory import MemorySettings
from moeflow.settings.option import Option
from moeflow.settings.sharing import SharingSettings
from moeflow.settings.tokens import TokenSettings
from moeflow.settings.weights import WeightSettings

_INTERNAL: Final = {"is_internal": True}  # verbs set it, by how they run the engine; no user's choice


@dataclass(frozen=True, kw_only=True)
class Settings(  # fields of the last base come first in help
    DiagnosticSettings,
    TokenSettings,
    ExpertSettings,
    SharingSettings,
    DeviceSettings,
    BatchingSettings,
    MemorySettings,
    WeightSettings,
):
    """The user's settings. None or "auto": to be decided."""

    model: str | None = None  # Hugging Face folder or GGUF file; None: the built-in model
    model_name: str | None = None
    is_served: bool = field(default=False, metadata=_INTERNAL)  # by a process of its own, in memory_bytes, too
    shares_memory: bool = field(default=False, metadata=_INTERNAL)  # with other models: KV caches leave memory for them
    cpu_isa: str = ""  # the best instruction set that the CPU kernels may use; empty: the best there is
    cache_dir: Path | None = None  # where the built-in model, packed experts and prompts are kept

    def check_counts(self) -> None:
        """Check that numbers are at least 1, and that threads and processes are not absurdly many.

        Raises: ConfigError.
        """
        for name, option in options().items():
            value = getattr(self, name)
            if option.kind != "count" or value is None:
                continue
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
            if option.most is not None and value > option.most:
                raise ConfigError(
                    f"{name} must be at most {option.most}, not {truncated_repr(value)}; take as many as cores"
                )


def options() -> dict[str, Option]:
    """Return the fields of `Settings` that the command line sets, in the order of help."""
    return {it.name: it.metadata["option"] for it in dataclasses.fields(Settings) if "option" in it.metadata}


def written_files() -> list[str]:
    """Return the names of the fields of `Settings` that name a file which one engine writes, of one model."""
    return [name for name, option in options().items() if option.kind == "new file"]


def dependent_settings(name: str) -> list[str]:
    """Return the fields of `Settings` to decide anew when the user changes the one of this name."""
    return [it.name for it in dataclasses.fields(Settings) if name in it.metadata.get("depends_on", ())]


def given_options(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that the user gave of these fields of `Settings`: flag of the command line -> value."""
    known, defaults = options(), Settings()
    given = [name for name in names if getattr(settings, name) != getattr(defaults, name)]
    return {known[name].flag: getattr(settings, name) for name in given}


def user_settings() -> list[str]:
    """Return the names of the fields of `Settings` that users may set: all but the verbs' own."""
    return [field.name for field in dataclasses.fields(Settings) if not field.metadata.get("is_internal", False)]


def to_plain(settings: Settings) -> dict[str, Any]:
    """Return the fields that are not at their defaults, as JSON holds them."""
    defaults = Settings()
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in fields.items() if value != getattr(defaults, name)}
    return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(given, enc_hook=str)))


def from_plain(given: dict[str, Any]) -> Settings:
    """Return the settings that `to_plain` made these fields of. Raises: ConfigError for any others."""
    try:
        if unknown := set(given) - {field.name for field in dataclasses.fields(Settings)}:
            raise ConfigError(f"no setting is called {truncated_repr(min(unknown))}")
        return msgspec.convert(given, Settings, dec_hook=lambda kind, value: kind(value))
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"settings cannot be read: {truncated(str(error))}") from None
