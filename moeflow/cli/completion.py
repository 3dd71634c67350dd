"""`moeflow completion`: prints the script for completions of `moeflow` in a shell."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

EPILOG = """\b
Examples:
  eval "$(moeflow completion bash)"
      for this shell; in ~/.bashrc: for every one
  eval "$(moeflow completion zsh)"
      in ~/.zshrc, behind compinit
  moeflow completion fish > ~/.config/fish/completions/moeflow.fish

Verbs, options, their values, files and the names of pulled models are completed."""

COMPLETE_VARIABLE = "_MOEFLOW_COMPLETE"  # how the script asks `moeflow` for completions; click's name for it
SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(epilog=EPILOG)
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, for a shell to read."""
    script = SHELLS[shell](ctx.find_root().command, {}, "moeflow", COMPLETE_VARIABLE)
    click.echo(script.source())
