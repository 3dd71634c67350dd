"""Writes docs/reference/command-line.md from the options of the commands and the table of engine settings.

python scripts/options_page.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from moeflow.cli.main import main  # noqa: E402
from moeflow.settings.settings import options  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "command-line.md"
HEAD = """# Command line

`scripts/options_page.py` writes this page from the commands. Each verb prints its part with `--help-all`, and examples.

- Options of [engine settings](#engine-settings) are shared by all verbs that run a model, and stand only there.
- In a [configuration file](../guides/run.md#a-configuration-file), and as settings of `LLM`, names have no dashes.
- `MOEFLOW_CPU_ISA` limits the instructions of the CPU kernels: `generic`, `avx2`, `avx2_vnni`, `avx512`, `avx512_vnni`,
  `avx512_bf16`, `amx`, and on ARM `neon`, `neon_dotprod`, `neon_i8mm`.
- Exit codes: [Run a server](../guides/run.md#stop).
"""
COLUMNS = ("| option | default | effect |", "| --- | --- | --- |")


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *_settings(), *_commands((), main)])


def _settings() -> Iterator[str]:
    """Yield the options of engine settings by group, as `serve` has them."""
    serve = main.get_command(click.Context(main), "serve")
    assert serve is not None
    shown = {param.name: param for param in serve.params}
    yield "## Engine settings\n"
    for group in dict.fromkeys(option.group for option in options().values()):
        yield f"### {group}\n"
        yield from COLUMNS
        yield from (_row(shown[name]) for name, option in options().items() if option.group == group and name in shown)
        yield ""


def _commands(words: tuple[str, ...], command: click.Command) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands((*words, name), child)
        return
    yield f"## moeflow {' '.join(words)}\n"
    summary = inspect.cleandoc(command.help or "").split("\n\n")[0]
    yield " ".join(summary.split()) + "\n"
    own = [param for param in command.params if isinstance(param, click.Option) and param.name not in options()]
    if own:
        yield from COLUMNS
        yield from map(_row, own)
        yield ""


def _row(param: click.Parameter) -> str:
    """Return the row of an option."""
    assert isinstance(param, click.Option)
    names = ", ".join([*param.opts, *param.secondary_opts])
    value = "" if param.is_flag else f" {param.make_metavar(click.Context(main))}"
    cells = (f"`{names}{value}`", _default(param), " ".join((param.help or "").split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(param: click.Option) -> str:
    """Return the default as help shows it; nothing for switches that are off."""
    if isinstance(param.show_default, str):
        return param.show_default
    default = param.default
    if param.is_flag:
        return "on" if default is True else ""
    return str(default) if isinstance(default, str | int | float) and not isinstance(default, bool) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
