"""Reads uploads: multipart forms of one file and a few short fields, of so many bytes at most."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from moeflow.core.units import KIB, format_bytes
from moeflow.server.errors import ApiError

_AROUND_BYTES = 64 * KIB  # of the form, without the file
_MAX_FIELDS = 8


class UploadTarget(Protocol):
    """Where the file goes."""

    path: Path

    def check_room(self, num_bytes: int) -> None:
        """Check, before anything is read, whether so many bytes may come. Raises: ApiError."""

    def count(self, num_bytes: int) -> None:
        """Count bytes before they are written. Raises: ApiError if there may be no more."""


class _ToDisk(MultiPartParser):
    """Has a form's file written to where it is to stay, as it comes; starlette's own place, /tmp, may be memory."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], target: UploadTarget) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=_MAX_FIELDS, max_part_size=KIB)
        self._target = target

    def on_headers_finished(self) -> None:
        """Begin a part."""
        super().on_headers_finished()
        upload = self._current_part.file
        if upload is not None:
            upload.file.close()
            upload.file = self._target.path.open("wb")
            self._files_to_close_on_error.append(upload.file)  # type: ignore[arg-type]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Take in a piece of a part."""
        if self._current_part.file is not None:
            self._target.count(end - start)
        super().on_part_data(data, start, end)


class UploadRequest(Request):
    """A request whose body must be a form within the server's limit. The file goes to disk as it comes."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body piece by piece. Raises: ApiError 413."""
        num_bytes = 0
        async for chunk in super().stream():
            num_bytes += len(chunk)
            if num_bytes > self._limit + _AROUND_BYTES:
                raise self._too_large()
            yield chunk

    async def upload(self, target: UploadTarget) -> tuple[str, FormData]:
        """Write the field `file` to where it is to go, and return its name and the whole form.

        If it fails, part of the file may be there.

        Raises: ApiError 400, 413 or 415; OSError.
        """
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
            raise ApiError(415, "unsupported_media_type", "Content-Type must be multipart/form-data")
        length = self.headers.get("content-length", "")
        if length.isdecimal():
            min_bytes = int(length[:20]) - _AROUND_BYTES
            if min_bytes > self._limit:
                raise self._too_large()
            target.check_room(min_bytes)
        try:
            form = await _ToDisk(self.headers, self.stream(), target).parse()
        except MultiPartException as error:
            raise ApiError(400, "invalid_form", f"the form cannot be read: {error.message}") from None
        await form.close()  # with this the last bytes are written
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "invalid_value", "file: a file is needed", param="file")
        return file.filename or "", form

    @property
    def _limit(self) -> int:
        return int(self.app.state.service.config.max_file_bytes)

    def _too_large(self) -> ApiError:
        return ApiError(413, "file_too_large", f"files may have {format_bytes(self._limit)} here; split it")


class UploadRoute(APIRoute):
    """Gives endpoints `UploadRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handle_upload(request: Request) -> Response:
            return await handle(UploadRequest(request.scope, request.receive))

        return handle_upload
