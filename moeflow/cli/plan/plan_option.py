"""--plan FILE: reads a plan and makes settings of it; explicit options take precedence, and are reported on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.core.errors import ConfigError
from moeflow.core.plan import Plan, plan_from_json
from moeflow.core.units import format_bytes
from moeflow.core.untrusted import UnreadableError, read_bounded
from moeflow.planner.settings import options

if TYPE_CHECKING:
    from moeflow.planner.settings import Settings


def settings_of(overrides: dict[str, Any]) -> Settings:
    """Return the settings of the command line; with --plan those of the plan, where no option sets another.

    Raises: ConfigError if the plan cannot be read, or is for another model or a machine with a device.
    """
    explicit = lazy.Settings(**{name: value for name, value in overrides.items() if name != "plan_file"})
    file: Path | None = overrides.get("plan_file")
    if file is None:
        return explicit
    plan = read_plan(file)
    settings = lazy.settings_from_plan(plan, explicit)
    for name, value, planned in lazy.overruled(plan, explicit):
        text = f"{options()[name].flag} {_text(name, value)} instead of the plan's {_text(name, planned)}, as you say"
        click.echo(f"note: {text}", err=True)
    if (notice := lazy.machine_notice(plan, explicit)) is not None:
        click.echo(f"warning: {notice}", err=True)
    return settings


def read_plan(file: Path) -> Plan:
    """Return the plan of a file. Raises: ConfigError."""
    try:
        text = read_bounded(file)
    except UnreadableError as error:
        raise ConfigError(f"plan {file} cannot be read: {error}") from None
    if not text.strip():
        raise ConfigError(
            f"plan {file} is empty: make it anew, `moeflow plan --json > {file}`, and see that it succeeds"
        )
    return plan_from_json(text, str(file))


def _text(name: str, value: Any) -> str:
    return format_bytes(value) if name.endswith("_bytes") and value is not None else str(value)
