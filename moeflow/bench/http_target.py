"""A running server as the target of traffic, spoken to as any OpenAI client would: `/v1/completions`, streamed.

Only this machine's own addresses, unless the user insists: traffic made to saturate is an attack on anybody else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from moeflow.core.errors import ConfigError, EngineError, RequestError
from moeflow.core.loopback import is_loopback_name
from moeflow.core.stream_lines import async_stream_lines
from moeflow.core.truncated_repr import truncated_repr
from moeflow.core.untrusted import UnreadableError, parse_json
from moeflow.workload.poisson import Arrival

MAX_CONNECTIONS = 1024  # requests under way; more wait here, and their waiting counts as latency
CONNECT_TIMEOUT_S = 10.0


class _ReportedUsage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _ReportedUsage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """What a server reports of its model. None: it does not report."""

    name: str
    vocab_size: int | None
    max_model_len: int | None


def check_address(url: str, *, allow_remote: bool) -> str:
    """Return the address without `/v1`; with http, if it names no scheme.

    Raises: ConfigError if it is no http address, or another machine's and that was not allowed.
    """
    url = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no address: {error}; write it like http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is no http address; write it like http://127.0.0.1:8000")
    if not (allow_remote or is_loopback_name(parsed.host)):
        raise ConfigError(
            f"{parsed.host} is not this machine, and the traffic is made to overload whoever gets it: "
            "add --allow-remote if the server is yours"
        )
    return url.rstrip("/").removesuffix("/v1")


class HttpTarget:
    """A server. Close it after use."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,  # a proxy from the environment would take the traffic elsewhere
            transport=transport,
        )
        self._model: str | None = None
        self._decoder = msgspec.json.Decoder(_Chunk)

    async def __aenter__(self) -> HttpTarget:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> ReportedModel:
        """Ask for the served models. Raises: EngineError if no server answers, RequestError if it refuses."""
        listed = await self._read("/v1/models")
        try:
            card = dict(listed["data"][0])
            self._model = str(card["id"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(f"{self._url} lists no model, but {truncated_repr(listed)}. Check the address") from None
        try:
            facts = (await self._read("/stats"))["model"] or {}
        except (RequestError, EngineError, KeyError, TypeError):  # another kind of server
            facts = {}
        return ReportedModel(
            self._model, facts.get("vocab_size"), facts.get("max_model_len", card.get("max_model_len"))
        )

    async def generate(self, request_id: str, arrival: Arrival) -> AsyncGenerator[int, None]:
        """See `replay.Target`. A server's event counts as a token until it reports how many there were in all."""
        body = {
            "model": self._model,
            "prompt": arrival.prompt_token_ids,
            "max_tokens": arrival.num_new,
            "temperature": 0,
            "repetition_penalty": 1,  # not the model's default: servers are compared on the same work
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        num_events = 0
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise RequestError(_explain(response))
                async for line in async_stream_lines(response.aiter_text()):
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    chunk = self._decoder.decode(data)
                    if chunk.error is not None:
                        raise EngineError(str(chunk.error))
                    if chunk.choices:
                        num_events += 1
                        yield 1
                    if chunk.usage is not None:
                        yield chunk.usage.completion_tokens - num_events
                        num_events = chunk.usage.completion_tokens
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._url} sent something that is no event: {error}") from error
        raise EngineError(f"{self._url} ended the answer before it was complete")

    async def _read(self, path: str) -> Any:
        try:
            response = await self._client.get(path)
        except httpx.HTTPError as error:
            raise EngineError(f"no server answers at {self._url}: {error}. Start one with `moeflow serve`") from error
        if response.is_error:
            raise RequestError(_explain(response))
        try:
            return parse_json(response.content)
        except UnreadableError as error:
            raise EngineError(f"{self._url} does not answer with JSON ({error}). Check the address") from None


def _explain(response: httpx.Response) -> str:
    """Return the server's own words, or its status if they are not OpenAI's error object."""
    try:
        return f"{response.status_code}: {parse_json(response.content)['error']['message']}"
    except (UnreadableError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"
