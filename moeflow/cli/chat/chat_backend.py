"""Who answers in a chat: the model in this process, or a running server. The chat cannot tell them apart.

Both take the whole conversation and give the answer piece by piece.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from moeflow.core.errors import EngineError, RequestError
from moeflow.core.sampling_params import CHOICE_FIELDS, SamplingParams
from moeflow.core.stream_lines import stream_lines
from moeflow.core.token_choice import TokenChoice
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.core.untrusted import UnreadableError, parse_json

if TYPE_CHECKING:
    from moeflow.llm import LLM

Messages = list[dict[str, Any]]
CONNECT_TIMEOUT_S = 5.0
SETTABLE = ("max_tokens", *CHOICE_FIELDS, "seed")


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What the next moment brought of an answer."""

    text: str
    num_tokens: int  # in this piece; a server's pieces count one each
    finish_reason: str | None = None


Answer = Generator[AnswerPiece, None, None]


class ChatBackend(Protocol):
    """Something that answers."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """How many tokens the model's context holds; None if the server does not say."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Values of the fields of `TokenChoice` that a request leaves open; empty if the server does not list them."""
        ...

    def model_names(self) -> list[str]:
        """Return the names of all models that can answer. Raises: EngineError if the engine is gone."""
        ...

    def use(self, name: str) -> None:
        """Have another model answer from now on. Raises: RequestError if there is none of that name, EngineError."""
        ...

    def count_tokens(self, said: str | Messages) -> int:
        """Return how many tokens a text has, or a conversation with the chat template around it.

        Raises: RequestError if they cannot be counted, EngineError if the engine is gone.
        """
        ...

    def answer(self, messages: Messages, sampling: SamplingParams) -> Answer:
        """Yield the answer as it comes; closing the iterator stops it.

        Raises: RequestError if the conversation is refused, EngineError if the engine is gone.
        """
        ...

    def close(self) -> None:
        """Let go of model or connection."""
        ...


class RemoteChat:
    """A running server, spoken to as any OpenAI client would."""

    def __init__(self, url: str, api_key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # an answer may take as long as it takes
        base = full_url(url).rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)
        self._url = base
        self.max_model_len: int | None = None  # nor is it known of a model that is not loaded
        self.sampling_defaults: Mapping[str, float] = {}
        self._use(self._models()[0])

    def model_names(self) -> list[str]:
        """See `ChatBackend`."""
        return [str(model["id"]) for model in self._models()]

    def use(self, name: str) -> None:
        """See `ChatBackend`."""
        models = {str(model["id"]): model for model in self._models()}
        if name not in models:
            raise RequestError(f"the server has no model {name!r}; it has {', '.join(models)}")
        self._use(models[name])

    def count_tokens(self, said: str | Messages) -> int:
        """See `ChatBackend`."""
        what = {"prompt": said, "add_special_tokens": False} if isinstance(said, str) else {"messages": said}
        found = self._read_object("POST", "/tokenize", {"model": self.name, **what})
        self.max_model_len = found.get("max_model_len", self.max_model_len)  # now loaded, if it was not
        if type(found.get("count")) is not int:
            raise self._makes_no_sense(found)
        return int(found["count"])

    def answer(self, messages: Messages, sampling: SamplingParams) -> Answer:
        """See `ChatBackend`."""
        body = {"model": self.name, "messages": messages, "stream": True, **to_json(sampling)}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise RequestError(_explain(response))
                yield from _pieces(stream_lines(response.iter_text()))
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url} is gone: {error}") from error

    def close(self) -> None:
        """See `ChatBackend`."""
        self._client.close()

    def _models(self) -> list[dict[str, Any]]:
        found = self._read_object("GET", "/v1/models")
        models = found.get("data")
        if not isinstance(models, list) or not models or not all(isinstance(it, dict) and "id" in it for it in models):
            raise self._makes_no_sense(found)
        return models

    def _use(self, model: dict[str, Any]) -> None:
        self.name = str(model["id"])
        self.max_model_len = model.get("max_model_len")
        changes = model.get("default_sampling_params")
        self.sampling_defaults = {} if changes is None else asdict(TokenChoice()) | changes

    def _read_object(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no server answers at {self._url}: {error}. Start one with `moeflow serve`") from error
        if response.is_error:
            raise RequestError(_explain(response))
        try:
            found = parse_json(response.content)
        except UnreadableError as error:
            raise EngineError(f"{self._url} does not answer with JSON ({error}). Check the address") from None
        if not isinstance(found, dict):
            raise self._makes_no_sense(found)
        return found

    def _makes_no_sense(self, found: object) -> EngineError:
        return EngineError(
            f"{self._url} answers {truncated_repr(found)}, as no server of OpenAI's API does. Check the address"
        )


class LocalChat:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.model.name
        self.max_model_len: int | None = llm.model.max_model_len
        self.sampling_defaults: Mapping[str, float] = asdict(llm.model.sampling_defaults)

    def model_names(self) -> list[str]:
        """See `ChatBackend`."""
        return [self.name]

    def use(self, name: str) -> None:
        """See `ChatBackend`."""
        if name != self.name:
            remedy = "start `moeflow serve --model A --model B` and chat with `--url`"
            raise RequestError(f"this chat has {self.name} alone; to change between models, {remedy}")

    def count_tokens(self, said: str | Messages) -> int:
        """See `ChatBackend`."""
        tokenizer = self._llm.tokenizer
        if isinstance(said, str):
            return len(tokenizer.encode(said, add_special_tokens=False))
        return len(tokenizer.apply_chat_template(said))

    def answer(self, messages: Messages, sampling: SamplingParams) -> Answer:
        """See `ChatBackend`."""
        for delta in self._llm.stream(messages, sampling):
            if delta.error is not None:
                raise EngineError(delta.error)
            yield AnswerPiece(delta.text, len(delta.token_ids), delta.finish_reason)

    def close(self) -> None:
        """See `ChatBackend`."""
        self._llm.close()


def full_url(url: str) -> str:
    """Return an address with its scheme: http, if none is named. Raises: RequestError if it can be none."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in ("http", "https"):
        raise RequestError(f"{url!r} is no address of a server; write it like http://127.0.0.1:8000")
    whole = url if separator else f"http://{url}"
    try:
        httpx.URL(whole)
    except httpx.InvalidURL as error:
        reason = truncated(str(error))
        raise RequestError(
            f"{truncated_repr(url)} is no address ({reason}); write it like http://127.0.0.1:8000"
        ) from None
    return whole


def to_json(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that the chat's user has set, as the API names them."""
    values = {name: getattr(sampling, name) for name in SETTABLE} | {"stop": list(sampling.stop) or None}
    return {name: value for name, value in values.items() if value is not None}


def _pieces(lines: Iterator[str]) -> Iterator[AnswerPiece]:
    """Read server-sent events up to the one that says [DONE]."""
    for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if not data:
            continue
        try:
            pieces = _pieces_of(parse_json(data))
        except (UnreadableError, KeyError, TypeError, AttributeError):
            raise EngineError(f"the server sent {truncated_repr(data)}, no part of an answer") from None
        yield from pieces
    raise EngineError("the server ended the answer before it was complete")


def _pieces_of(event: dict[str, Any]) -> list[AnswerPiece]:
    if "error" in event:
        raise EngineError(str(event["error"].get("message", event["error"])))
    texts = [(choice["delta"].get("content") or "", choice.get("finish_reason")) for choice in event["choices"]]
    return [AnswerPiece(str(text), int(bool(text)), reason) for text, reason in texts]


def _explain(response: httpx.Response) -> str:
    """Return the server's own words, or its status if they are not OpenAI's error object."""
    try:
        return str(parse_json(response.content)["error"]["message"])
    except (UnreadableError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"
