"""Verbs with many options: `--help` shows the few that people use, `--help-all` every one, in groups."""

from __future__ import annotations

from typing import Any

import click

OWN = "Options"  # sections of one verb, after the shared ones


class GroupedOption(click.Option):
    """An option that stands in a group of `--help-all`, and in `--help` only if it is common."""

    def __init__(self, *args: Any, group: str = OWN, is_common: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.is_common = is_common


class Command(click.Command):
    """A command whose `--help` leaves out options that are grouped and not common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all options and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, or all of them by group."""
        params = [it for it in self.get_params(ctx) if isinstance(it, click.Option)]
        if not ctx.meta.get(_ALL):
            params = [it for it in params if not isinstance(it, GroupedOption) or it.is_common]
        groups: dict[str, list[tuple[str, str]]] = {OWN: []}
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None:
                group = param.group if isinstance(param, GroupedOption) and ctx.meta.get(_ALL) else OWN
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def name_ranges(command: click.Command) -> None:
    """Have help and errors of a command, and of those below it, say "integer" and "number" where click says a range."""
    for param in command.params:
        if isinstance(param.type, click.IntRange | click.FloatRange):
            param.type.name = "integer" if isinstance(param.type, click.IntRange) else "number"
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        name_ranges(below)


_ALL = "moeflow.help_all"


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
