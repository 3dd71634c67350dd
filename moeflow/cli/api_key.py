"""--api-key KEY, which a server asks for and clients send; the environment may have it, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

Verb = TypeVar("Verb", bound=Callable[..., Any])
_VARIABLE: Final = "MOEFLOW_API_KEY"


def api_key_option(help_text: str) -> Callable[[Verb], Verb]:
    """Return the option with its help."""
    return click.option("--api-key", envvar=_VARIABLE, show_envvar=True, callback=_checked, help=help_text)


def _checked(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return a key that a header can carry. An empty variable is an error: a server would start without a key."""
    if value is None and _VARIABLE in os.environ:  # click takes an empty one for none
        raise click.BadParameter(f"{_VARIABLE} is empty; set it to a key, or unset it", ctx, param)
    if value is not None and not value.strip():
        raise click.BadParameter("the key is empty; give one, or leave the option out", ctx, param)
    if value is not None and (not value.isprintable() or value != value.strip()):
        raise click.BadParameter(
            "the key must be UTF-8 text without control characters or spaces around it; make one with "
            "`openssl rand -hex 32`",
            ctx,
            param,
        )
    return value
