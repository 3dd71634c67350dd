"""Runs checks against a server, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import httpx
import msgspec

from moeflow.cli.check.area import Check
from moeflow.cli.check.chat_checks import chat_checks
from moeflow.cli.check.embeddings_checks import embeddings_checks
from moeflow.cli.check.errors_checks import errors_checks
from moeflow.cli.check.generation_checks import generation_checks
from moeflow.cli.check.messages_checks import messages_checks
from moeflow.cli.check.models_checks import models_checks
from moeflow.cli.check.outcome import Failed, Refused, Result, Skipped, Status
from moeflow.cli.check.responses_checks import responses_checks
from moeflow.cli.check.target import ABSENT, Shared, Target
from moeflow.cli.check.tools_checks import tools_checks
from moeflow.core.errors import ConfigError, EngineError

_REQUIRED = {  # the path that an API has to have
    "openai": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "responses": "/v1/responses",
}


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def all_checks() -> list[Check]:
    """Return all checks in the order of their run."""
    openai = [*models_checks(), *generation_checks(), *chat_checks(), *tools_checks(), *errors_checks()]
    return [*openai, *embeddings_checks(), *messages_checks(), *responses_checks()]


def choose(api: str, only: str) -> list[Check]:
    """Return the checks of an API whose names match a pattern. Raises: ConfigError if there is none."""
    own = {"anthropic": ("messages",), "responses": ("responses",)}
    others = {area for areas in own.values() for area in areas}
    found = [
        check
        for check in all_checks()
        if (api in (_ANY, _ALL) or (check.area in own[api] if api in own else check.area not in others))
        and (fnmatchcase(check.full_name, only) or check.area == only)
    ]
    if not found:
        raise ConfigError(f"no check has a name like {only!r}; --list prints all names")
    return found


_ANY, _ALL = "any", "all"
APIS = (_ANY, *_REQUIRED, _ALL)


def open_server(client: httpx.Client, model: str | None, api_key: str | None) -> Shared:
    """Return the server with a model. Raises: ConfigError if none is named and listed, EngineError without a server."""
    target = Target(Shared(client, model or "", api_key))
    try:
        answer = target.get("/v1/models")
    except httpx.HTTPError as error:
        raise EngineError(f"no server answers at {client.base_url}: {error}. Check the address") from None
    if answer.status in (401, 403):
        raise ConfigError(f"{client.base_url} needs another key ({answer.status}): give it with --api-key")
    try:
        cards = msgspec.json.decode(answer.body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        cards = []
    if not model and not cards:
        raise ConfigError(f"{client.base_url} lists no model: name it with --model")
    card = next((it for it in cards if it.id == model), cards[0] if cards and not model else _Card(model or ""))
    return Shared(client, card.id, api_key, card.max_model_len)


def run_checks(shared: Shared, checks: Sequence[Check], api: str) -> Iterator[Result]:
    """Yield the result of each check."""
    required = _REQUIRED.values() if api == _ALL else (_REQUIRED.get(api),)
    absent: dict[str, str] = {}
    for path in dict.fromkeys(check.api_path for check in checks):
        absent[path] = _why_absent(Target(shared), path)
    for check in checks:
        reason = absent[check.api_path]
        if reason:
            yield _result(check, "FAILED" if check.api_path in required else "absent", 0, reason)
        else:
            yield _run(shared, check)


def _why_absent(target: Target, path: str) -> str:
    """Return why a server lacks a path; nothing if it has it."""
    probe = {"model": target.model, "max_tokens": 1}
    try:
        answer = target.get(path) if path == "/v1/models" else target.post(path, probe)
    except httpx.HTTPError:
        return ""  # the checks tell
    return f"the server has no {path} ({answer.status})" if answer.status in ABSENT else ""


def _run(shared: Shared, check: Check) -> Result:
    target, begin = Target(shared), time.monotonic()
    status, reason = _outcome(check, target)
    curl = target.requests[-1].curl() if target.requests and status in ("FAILED", "warning") else ""
    return _result(check, status, time.monotonic() - begin, reason, curl)


def _outcome(check: Check, target: Target) -> tuple[Status, str]:
    failed: Status = "warning" if check.is_advice else "FAILED"
    try:
        check.run(target)
    except Skipped as error:
        return "skipped", str(error)
    except Refused as error:
        return ("absent" if check.is_optional else failed), str(error)
    except Failed as error:
        return failed, str(error)
    except httpx.HTTPError as error:
        return failed, f"{type(error).__name__} {error}".strip()
    return "ok", ""


def _result(check: Check, status: Status, seconds: float, reason: str, curl: str = "") -> Result:
    return Result(check.area, check.name, check.description, check.source, status, round(seconds, 3), reason, curl)
