"""Answers the requests of a batch job: a window of them at a time in the engine, each result written when it is there.

The engine makes micro-batches of those in the window, and places them behind interactive requests. Knows no
HTTP and no state of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from moeflow.core.errors import EngineError, MoeflowError, RequestError
from moeflow.server.api.answer import Answer, gather
from moeflow.server.api.chat.chat import start_chat
from moeflow.server.api.chat.chat_objects import ChatRequest
from moeflow.server.api.completions.completion_objects import CompletionRequest
from moeflow.server.api.completions.completions import start_completion
from moeflow.server.api.responses.response_request import ResponseRequest
from moeflow.server.api.responses.responses import start_response
from moeflow.server.api.schema.left_out import LeftOut, noting
from moeflow.server.api.schema.sampling_fields import SamplerFields
from moeflow.server.errors import ApiError, as_api_error, from_pydantic
from moeflow.server.jobs.journal import ResultJournal
from moeflow.server.jobs.lines import BatchLine, parse_line, read_lines
from moeflow.server.model_pool import ModelLoadError
from moeflow.server.request_log import RequestRecord
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service

logger = logging.getLogger(__name__)

WINDOW = 4  # requests in the engines, in multiples of their concurrent ones: enough to choose micro-batches from
LOOK_S = 0.25  # how soon engines that join get requests
ATTEMPTS = 2  # at a request that fails through no fault of its own
SYNC_S = 1.0  # how much work a loss of power may undo


class _Endpoint(NamedTuple):
    schema: type[SamplerFields]
    start: Callable[..., Awaitable[Answer]]


_ENDPOINTS = {
    "/v1/chat/completions": _Endpoint(ChatRequest, start_chat),
    "/v1/completions": _Endpoint(CompletionRequest, start_completion),
    "/v1/responses": _Endpoint(ResponseRequest, start_response),
}


class ModelMissingError(EngineError):
    """The job's model cannot be loaded now."""


async def run_job(
    service: Service,
    source: Path,
    journal: ResultJournal,
    max_line_bytes: int,
    on_sync: Callable[[], None] = lambda: None,
    *,
    model: str | None = None,
) -> None:
    """Answer the unfinished requests of a scanned input file. Cancelling it leaves a journal to go on with.

    `on_sync` is called about once a second. `model` is the one that all requests are for, by default the first.

    Raises: EngineError if the engine ends: its open requests have no result; ConfigError if the error
    file is another job's; OSError.
    """
    syncing = asyncio.create_task(_sync(journal, on_sync))
    running = asyncio.create_task(_run(service, source, journal, max_line_bytes, model))
    try:
        await asyncio.wait((running, syncing), return_when=asyncio.FIRST_COMPLETED)
        await (running if running.done() else syncing)  # syncing ends by an error only, such as a full disk
    finally:
        running.cancel()
        syncing.cancel()
        await asyncio.gather(running, syncing, return_exceptions=True)
        journal.sync()


async def _sync(journal: ResultJournal, on_sync: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SYNC_S)
        await asyncio.to_thread(journal.sync)
        on_sync()


async def _run(service: Service, source: Path, journal: ResultJournal, max_line_bytes: int, model: str | None) -> None:
    window = _Window(await _require(service, model))
    try:
        with source.open("rb") as file:
            async with asyncio.TaskGroup() as group:
                for number, raw in read_lines(file, max_line_bytes):
                    line = parse_line(number, raw)
                    if line.custom_id in journal.done:
                        await asyncio.sleep(0)  # thousands of these must not hold others up
                        continue
                    await window.enter()
                    group.create_task(_answer_in_window(service, line, model, journal, window))
    except BaseExceptionGroup as errors:  # an error raised in `except*` comes in a group, before Python 3.11.4
        expected = errors.subgroup((MoeflowError, OSError))
        if expected is None:
            raise
        raise _first(expected) from None


class _Window:
    """Limits the open requests of a job. The limit follows the number of ready engines."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._limit, self._limit_until_s = 0, 0.0
        self._num_open = 0
        self._has_news = asyncio.Event()

    async def enter(self) -> None:
        """Wait until another request may begin, and count it."""
        while self._num_open >= self._find_limit():
            self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._has_news.wait()
        self._num_open += 1

    def _find_limit(self) -> int:
        """Return the limit. It is determined now and then: that takes longer than sending a request."""
        now_s = time.monotonic()
        if now_s >= self._limit_until_s:
            self._limit, self._limit_until_s = WINDOW * self._served.num_places, now_s + LOOK_S
        return self._limit

    def leave(self) -> None:
        """A request has ended."""
        self._num_open -= 1
        self._has_news.set()


async def _answer_in_window(
    service: Service, line: BatchLine, model: str | None, journal: ResultJournal, window: _Window
) -> None:
    try:
        await _answer(service, line, model, journal)
    finally:
        window.leave()


async def _answer(service: Service, line: BatchLine, model: str | None, journal: ResultJournal) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            body = await _body(service, line, model, _request_id(line, journal))
        except Exception as error:  # whatever a request may raise concerns its line alone, unless the engine is gone
            refusal = from_pydantic(error) if isinstance(error, ValidationError) else as_api_error(error)
            _check_there(refusal)
            if refusal.code == "internal_error":
                logger.exception("request %r failed", line.custom_id[:80])
            if refusal.status_code < 500 or attempt == ATTEMPTS:
                journal.write_refusal(line.custom_id, _request_id(line, journal), refusal.status_code, refusal.body)
                return
            logger.warning("request %r failed and is tried again: %s", line.custom_id[:80], refusal.detail)
        else:
            journal.write_answer(line.custom_id, body["id"], body)
            return


async def _body(service: Service, line: BatchLine, model: str | None, request_id: str) -> dict[str, Any]:
    """Return the answer to a request, whose story is kept. Raises: as `start` and `gather`."""
    record = RequestRecord(request_id, "POST", line.url)
    answer = await start(service, line, model)
    service.stories.begin(record, answer.generation)
    try:
        body = await gather(answer)
        record.is_complete = True
    except Exception as error:
        record.error = as_api_error(error)
        raise
    finally:
        service.stories.end(record)
    return body


async def start(service: Service, line: BatchLine, model: str | None = None) -> Answer:
    """Check a request as its endpoint does, and begin it with batch priority. A job's requests are all for one model.

    Raises: ValidationError, ApiError, RequestError.
    """
    endpoint = _ENDPOINTS[line.url]
    with noting(LeftOut(service.config.unknown_fields, images=service.config.images)):
        body = endpoint.schema.model_validate(line.body)
    if body.stream:
        raise RequestError("the answers of a batch come whole: leave stream out", param="stream")
    if body.model is None:
        body = body.model_copy(update={"model": model})
    elif model is not None and service.models.find(body.model).name != model:
        message = f"the batch is for {model!r}: put requests for other models into a file of their own"
        raise RequestError(message, param="model")
    return await endpoint.start(service, body, is_batch=True)


def _request_id(line: BatchLine, journal: ResultJournal) -> str:
    return f"req-{journal.result_ids[line.custom_id].removeprefix('batch_req_')}"


async def _require(service: Service, model: str | None) -> ServedModel:
    """Return the job's model. Raises: EngineError if no engine computes it."""
    try:
        return await service.require_model(model, is_batch=True)
    except ApiError as error:
        _check_there(error)
        raise EngineError(error.detail) from None


def _check_there(refusal: ApiError) -> None:
    """Raises: EngineError if a request was refused because no engine computes it."""
    if isinstance(refusal, ModelLoadError):
        raise ModelMissingError(refusal.detail) from None
    if refusal.status_code == 503:
        raise EngineError(refusal.detail) from None


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
