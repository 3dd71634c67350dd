"""`moeflow chat`: a conversation in the terminal.

Without a terminal on stdin, every line is a question and stdout holds the answers alone.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any

import click

from moeflow.cli.api_key import api_key_option
from moeflow.cli.chat.chat_backend import ChatBackend, LocalChat, RemoteChat
from moeflow.cli.chat.commands import HELP, Commands, Leave, Retry
from moeflow.cli.chat.conversation import ChatHistory
from moeflow.cli.chat.typed_input import InputHistory, read_input
from moeflow.cli.help import Command
from moeflow.cli.kept_bytes import HISTORY_FILE
from moeflow.cli.local_model import fetch_if_named, load
from moeflow.cli.options import engine_options, explain_option, pull_option, sampling_options
from moeflow.core.errors import ChatTemplateError, RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.planner.usage import CONVERSATION

EPILOG = """\b
Examples:
  moeflow chat                                  talk to the built-in model
  moeflow chat ~/models/olmoe --temperature 0.7 --system "Answer in French."
  moeflow chat --url http://127.0.0.1:8000      talk to a running server
  echo "What is the capital of France?" | moeflow chat

In the chat, /help lists the commands: /retry, /save FILE.md, /load FILE.md, /context and more. A backslash at a line's
end goes on in the next line; what was typed before is remembered, in a file in the cache folder that only you can read.
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D leaves. Where stdin is a file or a pipe, every line of it is a
question, and nothing but answers is printed."""


@click.command(cls=Command, epilog=EPILOG)
@engine_options
@sampling_options
@pull_option
@explain_option
@click.option("--system", help="A system prompt: who the model is, how it shall answer.")
@click.option("--url", help="Talk to this server instead of loading a model here.")
@api_key_option("The server's key, with --url.")
def chat(
    overrides: dict[str, Any],
    sampling: SamplingParams,
    pulls: bool,
    explains: bool,
    system: str | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """Talk to a model in the terminal; answers appear as they are made.

    MODEL is a Hugging Face folder, a .gguf file, or the name of a pulled model; without it, the built-in model answers.
    """
    if url and overrides["model"]:
        raise click.UsageError("MODEL and --url exclude each other: the server has its own model")
    if pulls:
        fetch_if_named(overrides["model"])
    history = InputHistory(overrides["cache_dir"] / HISTORY_FILE) if sys.stdin.isatty() else None
    backend = RemoteChat(url, api_key) if url else LocalChat(load(overrides, CONVERSATION, explains=explains))
    with closing(backend):
        converse(backend, ChatHistory(sampling, system), history)


def converse(backend: ChatBackend, conversation: ChatHistory, history: InputHistory | None = None) -> None:
    """Read, answer, show, until the user leaves or the input ends."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        click.echo(f"{backend.name}. {HELP.splitlines()[-1]} /help for more.")
    commands = Commands(conversation, backend)
    for text in questions(at_terminal):
        try:
            if history is not None:
                with suppress(KeyboardInterrupt):  # the answer then begins, and can be stopped
                    history.add(text)
            is_command = at_terminal and text.startswith("/") and "\n" not in text
            shown = commands.run(text) if is_command else None
            if isinstance(shown, str):
                click.echo(shown)
            elif isinstance(shown, Retry):
                answer(backend, conversation, shown.question, show_speed=True, again=True)
            else:
                answer(backend, conversation, text, show_speed=at_terminal)
        except Leave:
            return
        except (RequestError, ChatTemplateError) as error:
            if not at_terminal:
                raise
            click.echo(f"error: {error}\n/reset starts over, /set shows what can be changed", err=True)


def questions(at_terminal: bool) -> Iterator[str]:
    """Yield typed texts, or the lines of a file. It ends with the input, or with Ctrl-C or Ctrl-D at the prompt."""
    while True:
        try:
            text = read_input() if at_terminal else input().strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            break
        if text:
            yield text
    if at_terminal:
        click.echo()


def answer(
    backend: ChatBackend, conversation: ChatHistory, question: str, *, show_speed: bool, again: bool = False
) -> None:
    """Print the answer as it comes and remember it; if the question is asked `again`, in the place of the last one."""
    started = time.monotonic()
    first = None
    num_tokens = 0
    text = ""
    with (
        stoppable() as is_stopped,
        closing(backend.answer(conversation.messages(question, again=again), conversation.sampling)) as pieces,
    ):
        for piece in pieces:
            first = first or time.monotonic()
            num_tokens += piece.num_tokens
            text += piece.text
            click.echo(piece.text, nl=False)
            if is_stopped():
                break
    click.echo()
    conversation.add(question, text, again=again)
    if show_speed and first:
        click.secho(speed(num_tokens, first - started, time.monotonic() - first), dim=True)


def speed(num_tokens: int, first_s: float, rest_s: float) -> str:
    """Write how fast an answer came. The first token's time is the prompt's, so the rate leaves it out."""
    rate = f", {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
    return f"[{num_tokens} tokens{rate}, first after {first_s:.2f} s]"


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Take the first Ctrl-C as a request to stop, so that the pass under way ends in order; a second one interrupts."""
    is_asked = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, before)
