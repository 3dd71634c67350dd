"""Reads uploads: multipart forms of one file and a few short fields, of so many bytes at most."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from moeflow.core.units import KIB, format_bytes
from moeflow.server.errors import ApiError

_AROUND_BYTES = 64 * KIB  # of the form, beside the file
_MAX_FIELDS = 8


class UploadRequest(Request):
    """A request whose body must be a form within the server's limit. The file goes to disk as it comes."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body piece by piece.

        Raises: ApiError 413.
        """
        limit = int(self.app.state.service.config.max_file_bytes)
        num_bytes = 0
        async for chunk in super().stream():
            num_bytes += len(chunk)
            if num_bytes > limit + _AROUND_BYTES:
                raise ApiError(413, "file_too_large", f"files may have {format_bytes(limit)} here; split it")
            yield chunk

    async def upload(self) -> tuple[UploadFile, FormData]:
        """Return the field `file` and the whole form, which the caller closes.

        Raises: ApiError 400, 413 or 415.
        """
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
            raise ApiError(415, "unsupported_media_type", "Content-Type must be multipart/form-data")
        try:
            form = await self.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=KIB)
        except ApiError:
            raise
        except HTTPException as error:  # starlette's, for a form that is none
            raise ApiError(400, "invalid_form", f"the form cannot be read: {error.detail}") from None
        file = form.get("file")
        if not isinstance(file, UploadFile):
            await form.close()
            raise ApiError(400, "invalid_value", "file: a file is needed", param="file")
        return file, form


class UploadRoute(APIRoute):
    """Gives endpoints `UploadRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handle_upload(request: Request) -> Response:
            return await handle(UploadRequest(request.scope, request.receive))

        return handle_upload
