"""The `moeflow` command: finds the verb, runs it, and turns what went wrong into one line and an exit code.

Has the name, the one-line help and the module of each verb. The module is imported when the verb is used, so `moeflow
--help` answers at once. Every verb's module has a click command named like the verb; it is named like
the verb, too, unless the verb has a folder.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from moeflow.cli.help import name_ranges
from moeflow.core.errors import EngineError, MoeflowError
from moeflow.core.near_names import did_you_mean
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from click import shell_completion

VERBS = {
    "serve": "Serve a model: OpenAI- and Anthropic-compatible APIs and a chat page.",
    "status": "Show a server, its engines on each machine, its queue and its jobs.",
    "scale": "Change the number of engines of a server on a Ray cluster.",
    "join": "Compute part of a model for a server on another machine.",
    "lend": "Lend memory for experts to a server on another machine.",
    "pull": "Download a model from Hugging Face; then use its name like a path.",
    "list": "List downloaded models, and whether they fit this machine.",
    "rm": "Delete a downloaded model and the files built from it.",
    "chat": "Chat with a model in the terminal.",
    "generate": "Complete prompts and exit, for scripts.",
    "batch": "Answer a file of requests; stop and resume at any time.",
    "train": "Train drafters, expert predictors and classifiers for a model.",
    "upcycle": "Make a Mixture-of-Experts model from a dense one.",
    "pack": "Store a model's weights in the layout of memory, for an instant start.",
    "cache": "Show the files of moeflow on this disk, or delete them.",
    "bench": "Measure speed and quality, compared with the limits of this machine.",
    "plan": "Plan how to run a model on this or another machine, and predict its speed.",
    "simulate": "Simulate other memory sizes, policies, pipelines, machines or traffic.",
    "check": "Check whether a server conforms to the APIs of OpenAI and Anthropic.",
    "chaos": "Kill and disturb parts of a test deployment, and check its answers.",
    "doctor": "Check this machine: resources, problems, remedies.",
    "completion": "Print a script for shell completions.",
}
IN_FOLDERS = {
    "bench": "bench.group",
    "chaos": "chaos.chaos",
    "chat": "chat.chat",
    "check": "check.check",
    "doctor": "doctor.doctor",
    "plan": "plan.plan",
    "simulate": "simulate.group",
    "train": "train.group",
}
_NAMED_ELSE = {"list": "list_models"}  # in their modules: verbs that mean something in Python

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_TOLD = 143  # likewise, SIGTERM


class Shell(click.Group):
    """A group that imports its verbs late and reports errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of a newcomer's needs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module and return its command."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"moeflow.cli.{IN_FOLDERS.get(cmd_name, cmd_name)}")
        command = getattr(module, _NAMED_ELSE.get(cmd_name, cmd_name))
        assert isinstance(command, click.Command)
        name_ranges(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[shell_completion.CompletionItem]:
        """Complete a verb without importing any, or an option of this command."""
        verbs = [
            shell_completion.CompletionItem(verb, help=text)
            for verb, text in VERBS.items()
            if verb.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; an unknown verb is an error that suggests a similar one."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], VERBS, f"there are {', '.join(VERBS)}")
            raise click.UsageError(f"no such command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, and exit with the code of the result."""
        run = super().main
        run_and_exit(lambda: run(*args, **{**extra, "standalone_mode": False}))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; with --debug, show where an error came from before it becomes one line."""
        try:
            return super().invoke(ctx)
        except (MoeflowError, OSError, UnicodeError):
            if ctx.params["debug"]:
                sys.excepthook(*sys.exc_info())
            raise


def run_and_exit(run: Callable[[], Any]) -> NoReturn:
    """Run a click command and exit: 0 done, 1 failed, 2 wrong input, 130 interrupted, 143 told to end."""
    try:
        with _leaving_in_order(), _ending_quietly():
            result = run()
    except click.Abort:  # click's name for Ctrl-C
        sys.exit(EXIT_INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:  # no verb at all
        click.echo(error.format_message())
        sys.exit(EXIT_BAD_INPUT)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "moeflow"
        fail(f"{error.format_message()}\nTry '{where} --help'.", EXIT_BAD_INPUT)
    except click.ClickException as error:
        fail(error.format_message(), error.exit_code)
    except MoeflowError as error:
        fail(str(error), EXIT_FAILED if isinstance(error, EngineError) else EXIT_BAD_INPUT)
    except OSError as error:  # a full disk, a missing folder, a port in use
        fail(str(error), EXIT_FAILED)
    except UnicodeError as error:  # a prompt in another encoding
        fail(f"a text is not UTF-8 ({error}). Convert it, as with `iconv -t UTF-8`", EXIT_BAD_INPUT)
    sys.exit(result if isinstance(result, int) else 0)


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Have SIGTERM leave the block as Ctrl-C does, past all that has to be closed, written or put away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TOLD))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """Have Ctrl-C disturb no longer once the block is left and the program ends: nothing is left to interrupt.

    Nor is all that was imported to be gone through for garbage then, which takes a quarter of a second with torch.
    """
    try:
        yield
    finally:  # the last registered runs first
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        atexit.register(gc.freeze)


def fail(message: str, code: int) -> None:
    """Print one clear line to stderr and exit."""
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


EPILOG = """\b
Examples:
  moeflow serve
      serve the built-in model on http://127.0.0.1:8000
  moeflow chat                  talk to it here
  moeflow pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
      fetch a model; then serve, chat or generate by this name
  moeflow doctor ~/models/mine  will this model run here?"""


@click.group(
    "moeflow",
    cls=Shell,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="moeflow", message="moeflow %(version)s")
@click.option(
    "--debug", is_flag=True, envvar="MOEFLOW_DEBUG", help="Show where an error came from (or set MOEFLOW_DEBUG=1)."
)
def main(debug: bool) -> None:
    """Run Mixture-of-Experts language models on the hardware you have."""


if __name__ == "__main__":
    main()
