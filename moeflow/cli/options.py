"""Options that several verbs share, and where the environment is read.

The verbs' heavy imports stay out of here: overrides are passed on as plain values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from moeflow.cli.config_file import config_option
from moeflow.cli.help import GroupedOption
from moeflow.cli.params import NEW_FILE, complete_model
from moeflow.core.errors import ConfigError
from moeflow.core.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from moeflow.core.units import MIB, parse_bytes
from moeflow.settings.option import Option
from moeflow.settings.settings import MAX_THREADS, Settings, options

_MIN_MIB = 64  # so many of something are more likely mebibytes than gibibytes

Verb = TypeVar("Verb", bound=Callable[..., Any])


def byte_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a size like 2GiB; for the `callback` of an option."""
    try:
        return None if value is None else parse_bytes(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def memory_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read an amount of memory likewise; a number that would be too few bytes for anything lacks its unit."""
    num_bytes = byte_count(ctx, param, value)
    if value is not None and num_bytes is not None and num_bytes < MIB and value.strip().isdecimal():
        unit = "GiB" if num_bytes < _MIN_MIB else "MiB"
        raise click.BadParameter(
            f"{value!r} has no unit and would be bytes; did you mean {value.strip()}{unit}?", ctx, param
        )
    return num_bytes


def default_cache_dir() -> Path:
    """Where models are built and experts packed: $MOEFLOW_CACHE, else moeflow/ in $XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("MOEFLOW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moeflow"


threads_option = click.option(
    "--threads", "num_threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads.  [default: all cores]"
)
cache_dir_option = click.option(
    "--cache-dir",
    cls=GroupedOption,
    group="Files",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="MOEFLOW_CACHE",  # which goes before a configuration file, as the default does not
    callback=lambda ctx, param, value: value.expanduser(),
    default=default_cache_dir,
    show_default="$MOEFLOW_CACHE or ~/.cache/moeflow",
    help="Where the built-in model and packed experts are kept.",
)


def _kind(option: Option) -> dict[str, Any]:
    """Return how click reads an option."""
    match option.kind:
        case "choice":
            return {"type": click.Choice(option.choices)}
        case "count":
            return {"type": click.IntRange(1)}
        case "number":
            return {"metavar": "NUMBER", "type": click.FloatRange(0, min_open=True)}
        case "seconds":
            return {"metavar": "SECONDS", "type": click.FloatRange(0, min_open=True)}
        case "texts":
            return {"multiple": True}
        case "bytes":
            return {"metavar": "SIZE", "callback": memory_size}
        case "existing file":
            return {"type": click.Path(dir_okay=False, path_type=Path)}
        case "folder":
            return {"metavar": "DIR", "type": click.Path(file_okay=False, path_type=Path)}
        case "new file":
            return {"type": NEW_FILE}
        case _:
            return {}


def settings_option(name: str) -> Callable[[Verb], Verb]:
    """Return the option that sets a field of `Settings`."""
    option, default = options()[name], getattr(Settings(), name)
    return click.option(
        option.flag,
        name,
        cls=GroupedOption,
        group=option.group,
        is_common=option.is_common,
        default=default,
        show_default=option.shown_default or default is not None,
        help=option.help,
        **_kind(option),
    )


_PLAN = click.option(
    "--plan",
    "plan_file",
    type=click.Path(dir_okay=False, path_type=Path),
    cls=GroupedOption,
    group="Diagnostics",
    help="Run what `moeflow plan --json` wrote; other options take precedence.",
)


explain_option = click.option(
    "--explain",
    "explains",
    is_flag=True,
    cls=GroupedOption,
    group="Diagnostics",
    is_common=True,
    help="Print what would be chosen, what to expect and why, and exit.",
)


pull_option = click.option(
    "--pull",
    "pulls",
    is_flag=True,
    cls=GroupedOption,
    group="Files",
    is_common=True,
    help="Download MODEL first if it is a name and not downloaded yet.",
)


def engine_options_but(*left_out: str) -> Callable[[Verb], Verb]:
    """Return what adds MODEL and the options that shape an engine, but for some fields of `Settings`.

    The verb gets them as one dict, `overrides`: the settings that the user gave, model, plan and cache folder.
    """
    served_only = (name for name, option in options().items() if option.is_served_only)
    return _engine_options(*left_out, *served_only)


def _engine_options(*left_out: str) -> Callable[[Verb], Verb]:
    names = [name for name in options() if name not in left_out]

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def gathered(**kwargs: Any) -> Any:
            overrides = _only_given(_gather(kwargs, names)) | _gather(kwargs, ("model", "plan_file", "cache_dir"))
            if cpu_isa := os.environ.get("MOEFLOW_CPU_ISA"):
                overrides["cpu_isa"] = cpu_isa
            return verb(overrides=overrides, **kwargs)

        shared = [
            click.argument("model", required=False, shell_complete=complete_model),
            config_option,
            *map(settings_option, names),
            _PLAN,
            cache_dir_option,
        ]
        return _stack(shared, gathered)  # type: ignore[no-any-return]

    return decorate


engine_options = engine_options_but()
served_engine_options = _engine_options()  # and those of an engine in a process of its own


def _stack(options: list[Callable[[Any], Any]], function: Any) -> Any:
    return functools.reduce(lambda inner, option: option(inner), reversed(options), function)


def _only_given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the command line, the environment or a configuration file, without defaults."""
    source_of = click.get_current_context().get_parameter_source
    return {name: value for name, value in values.items() if source_of(name) is not ParameterSource.DEFAULT}


def _gather(kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in names}


_MODELS_OWN = "the model's"

_SAMPLING_OPTIONS = [
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Longest answer, in tokens.  [default: `generate`: 512, or what the context leaves; `chat`: all of that]",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(0, MAX_TEMPERATURE),
        show_default=_MODELS_OWN,
        help="0: always the likeliest token; higher: more varied.",
    ),
    click.option(
        "--top-p",
        cls=GroupedOption,
        group="Sampling",
        type=float,
        show_default=_MODELS_OWN,
        help="Sample from the likeliest tokens whose shares sum to this.",
    ),
    click.option(
        "--top-k",
        cls=GroupedOption,
        group="Sampling",
        type=int,
        show_default=_MODELS_OWN,
        help="Sample from this many likeliest tokens; 0: all.",
    ),
    click.option(
        "--min-p",
        cls=GroupedOption,
        group="Sampling",
        type=float,
        show_default=_MODELS_OWN,
        help="Leave out tokens less likely than this share of the likeliest.",
    ),
    click.option(
        "--repetition-penalty",
        cls=GroupedOption,
        group="Sampling",
        type=float,
        show_default=_MODELS_OWN,
        help=f"Above 1: repeat less; from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same answer.  [default: a new one each time]"),
    click.option("--stop", multiple=True, help="End the answer before this text; may be given several times."),
]
_SAMPLING_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def sampling_options(verb: Verb) -> Verb:
    """Add the options that choose tokens; the verb gets them as `sampling`."""

    @functools.wraps(verb)
    def gathered(**kwargs: Any) -> Any:
        return verb(sampling=SamplingParams(**_gather(kwargs, _SAMPLING_NAMES)), **kwargs)

    return _stack(_SAMPLING_OPTIONS, gathered)  # type: ignore[no-any-return]
