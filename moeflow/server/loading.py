"""Loads one model: engine and tokenizer side by side, with a bar where a terminal watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from moeflow.core.errors import MoeflowError
from moeflow.core.plan import Plan
from moeflow.engine.generator import Generator
from moeflow.processes.supervisor import Supervisor
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer

Loaded = TypeVar("Loaded")


async def load_model(
    plan: Plan,
    config: ServerConfig,
    *,
    on_failure: Callable[[], None],
    on_begun: Callable[[Supervisor], None] | None = None,
) -> Generator:
    """Load model and tokenizer side by side; if one fails, nothing is left of the other.

    `on_begun` gets the engines before they load.
    """
    columns = (TextColumn(f"loading {plan.config.model_name}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("load", total=None)
        starting = asyncio.create_task(
            Supervisor.start(
                plan.config,
                plan.num_replicas,
                nodes=plan.node_replicas,
                max_restarts=config.max_engine_restarts,
                timeout_s=config.engine_timeout_s,
                on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
                on_failure=on_failure,
                on_begun=on_begun,
            )
        )
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, plan.config.model_path)
            return Generator(await starting, tokenizer)
        except BaseException:
            await give_up(starting, lambda client: client.shutdown(0))
            raise


async def give_up(loading: asyncio.Task[Loaded], end: Callable[[Loaded], Awaitable[None]]) -> None:
    """Cancel a running load, so that nothing is left of it; `end` is for a model that has just been loaded."""
    loading.cancel()  # cleans up by itself, unless it had just succeeded
    with contextlib.suppress(asyncio.CancelledError, MoeflowError):
        await end(await loading)


def load_tokenizer(model: str) -> Tokenizer:
    """Return a model's tokenizer, ready for use. Raises: what keeps it from loading."""
    tokenizer = Tokenizer.load(model)
    tokenizer.warm_up()
    return tokenizer
