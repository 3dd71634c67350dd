"""--config FILE: options of verbs in a TOML file, for what neither the command line nor the environment sets.

Keys are options without their dashes, and `model`; `models` is the list of models for `serve`. Those at
the top hold for every verb, those in a verb's table (`[serve]`, `[bench.serve]`) for that one, and go first. Other
verbs' tables are not looked into.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from moeflow.cli.help import GroupedOption
from moeflow.core.errors import ConfigError
from moeflow.core.near_names import did_you_mean
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.core.untrusted import UnreadableError, parse_toml, read_bounded

_MODEL = "model"  # the one argument that a file may set
_MODELS = "models"  # --model, where it may be given several times


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Have what the file says be the verb's defaults; for the `callback` of an eager option.

    Raises: ConfigError, naming file and key, if there is no such file, option or value.
    """
    if value is None or ctx.resilient_parsing:
        return
    ctx.default_map = _defaults(ctx, param, value)


config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    cls=GroupedOption,
    group="Files",
    is_common=True,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with options; the command line and the environment take precedence.",
)


def _defaults(ctx: click.Context, config: click.Parameter, file: Path) -> dict[str, Any]:
    params = {
        _key(param): param
        for param in ctx.command.params
        if param.expose_value and param is not config and (isinstance(param, click.Option) or param.name == _MODEL)
    }
    found: dict[str, Any] = {}
    for name, value in _settings(ctx, _parse(file), file):
        key = name.rpartition(".")[2]
        if key not in params:
            other = "what only another verb has belongs into its table, such as [serve]"
            meant = did_you_mean(key, params, other)
            raise ConfigError(f"{file}: {truncated(name)} is not an option of `{ctx.command_path}`; {meant}")
        param = params[key]
        assert param.name is not None
        try:
            found[param.name] = _checked(ctx, param, value)
        except click.BadParameter as error:
            raise ConfigError(f"{file}: {name}: {truncated(error.message)}") from None
    return found


def _parse(file: Path) -> dict[str, Any]:
    try:
        data = read_bounded(file)
    except UnreadableError as error:
        raise ConfigError(f"config {file} cannot be read: {error}") from None
    try:
        return parse_toml(data)
    except UnreadableError as error:
        raise ConfigError(f"config {file} is not TOML: {error}") from None


def _settings(ctx: click.Context, table: dict[str, Any], file: Path) -> Iterable[tuple[str, Any]]:
    """Yield what the file sets for this verb, the most general first: dotted names and values."""
    words = ""
    for context in _from_shell_to_verb(ctx):
        if context.parent is not None:
            table = table.get(context.info_name or "", {})
            words += f"{context.info_name}."
        verbs = context.command.list_commands(context) if isinstance(context.command, click.Group) else []
        for name, value in table.items():
            if not isinstance(value, dict):
                yield words + name, value
            elif name not in verbs:
                meant = did_you_mean(name, verbs, "tables are named after verbs, such as [serve]")
                raise ConfigError(f"{file}: [{words}{truncated(name)}] is not a verb of moeflow; {meant}")


def _from_shell_to_verb(ctx: click.Context) -> list[click.Context]:
    return [*(_from_shell_to_verb(ctx.parent) if ctx.parent is not None else ()), ctx]


def _key(param: click.Parameter) -> str:
    """Return the name of an option in a file: its long form without dashes."""
    return _MODELS if param.name == _MODELS else max(param.opts, key=len).lstrip("-")


def _checked(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the value as text for the command line, which parses it. Raises: click.BadParameter."""
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter(f"must be true or false, not {truncated_repr(value)}")
        return value
    given: str | list[str]
    if isinstance(param, click.Option) and param.multiple:
        if not isinstance(value, list):
            raise click.BadParameter(f"must be a list, such as [{truncated_repr(value)}]")
        given = [_text(param, item) for item in value]
    else:
        given = _text(param, value)
    param.process_value(ctx, given)
    return given


def _text(param: click.Parameter, value: Any) -> str:
    """Return what would be typed: a `~` in front of a path is the home folder, as in a shell."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter(f"must be one text or number, not {truncated_repr(value)}")
    is_path = isinstance(param.type, click.Path) or param.name == _MODEL
    return os.path.expanduser(value) if is_path and isinstance(value, str) else str(value)
