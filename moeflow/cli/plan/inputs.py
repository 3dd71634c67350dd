"""What `moeflow plan` gets to know of the workload: lengths of prompts from a file, and hits from recorded routing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeflow.cli import lazy
from moeflow.cli.pulling import is_headers_alone
from moeflow.core.errors import ConfigError
from moeflow.core.plan import Workload
from moeflow.core.units import MIB, format_bytes
from moeflow.core.untrusted import UnreadableError, parse_json
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.simulator.routing_study import study_trace
from moeflow.planner.usage import BYTES_PER_TOKEN, TYPICAL, Usage, average_workload
from moeflow.workload.routing_trace import read_routing_trace

MAX_LOOKED_AT = 1000  # requests of a batch, for their lengths
_MAX_LINE_BYTES = 32 * MIB


def workload_of(file: Path, model: str, gen_len: int, rate: float) -> tuple[Workload, int]:
    """Return what a JSONL of prompts asks of a model, and how many requests there are.

    A line is a text, or an object with `prompt`, `messages`, `turns` or a batch request's `body`; `max_tokens` in it
    counts instead of `gen_len`. Raises: ConfigError if a line is none of these.
    """
    has_tokenizer = Path(model).suffix == ".gguf" or not is_headers_alone(model)  # GGUF has it in its header
    is_whole = Path(model).exists() and Path(model).suffix != ".json"
    tokenizer = lazy.Tokenizer.load(model) if is_whole and has_tokenizer else None
    prompts, answers = [], []
    for number, item in enumerate(_lines(file), 1):
        text, gen = _request(item)
        if text is None:
            raise ConfigError(f"{file}, line {number}: has none of prompt, messages, turns and body")
        prompts.append(len(tokenizer.encode(text)) if tokenizer else _estimated_tokens(text))
        answers.append(gen or gen_len)
    if not prompts:
        raise ConfigError(f"{file} has no prompts in it")
    return average_workload(prompts, answers, rate), len(prompts)


def batch_usage(file: Path, num_requests: int) -> Usage:
    """Return what a checked file of batch requests is planned for, by its first requests; lengths are estimates."""
    requests = [_request(body) for body in itertools.islice(lazy.read_bodies(file), MAX_LOOKED_AT)]
    prompts = [_estimated_tokens(text) if text else TYPICAL.prompt_len for text, _ in requests]
    answers = [gen or TYPICAL.gen_len for _, gen in requests]
    workload = average_workload(prompts, answers) if requests else TYPICAL
    return Usage(workload=workload, num_requests=max(num_requests, 1))


def _estimated_tokens(text: str) -> int:
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)


def _request(item: Any) -> tuple[str | None, int | None]:
    """Return a line's prompt and the answer's length, where it has them."""
    body = item.get("body", item) if isinstance(item, dict) else {"prompt": item}
    asked = body.get("max_tokens", body.get("max_completion_tokens")) if isinstance(body, dict) else None
    return _text(body), asked if isinstance(asked, int) and asked > 0 else None


def routing_of(routing: Path) -> RoutingProfile:
    """Return how recorded routers behave, replayed over sizes of the expert cache.

    Raises: ConfigError if the file holds no routing.
    """
    return study_trace(read_routing_trace(routing))


def _lines(file: Path) -> Iterator[Any]:
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > _MAX_LINE_BYTES:
                raise ConfigError(f"{file}, line {number}: is longer than {format_bytes(_MAX_LINE_BYTES)}")
            if line.strip():
                try:
                    yield parse_json(line)
                except UnreadableError as error:
                    raise ConfigError(f"{file}, line {number}: is no JSON ({error})") from None


def _text(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    if isinstance(body.get("turns"), list) and body["turns"]:
        return str(body["turns"][0])
    if isinstance(body.get("messages"), list):
        return "\n".join(str(message.get("content")) for message in body["messages"] if isinstance(message, dict))
    return None
