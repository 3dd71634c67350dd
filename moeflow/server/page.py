"""Serves the page at `/`: plain static files, allowed to speak with this server and nobody else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

WEB_FOLDER = Path(__file__).parent / "web"
_FONT = ".woff2"  # which Python may not know the type of
_HEADERS = {
    # Trusted types: no text becomes markup, and a script only the worker that colours code (web/code/highlighter.js).
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types highlighter",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask again each time; an unchanged file then costs a 304
}


def add_page(app: FastAPI, folder: Path = WEB_FOLDER) -> None:
    """Add one route for every file in the folder, so that a wrong path of the API stays a 404 of the API."""
    files = StaticFiles(directory=folder)

    async def send_file(request: Request) -> Response:
        name = request.url.path.lstrip("/") or "index.html"
        response = await files.get_response(name, request.scope)
        response.headers.update(_HEADERS)
        if name.endswith(_FONT):
            response.headers["Content-Type"] = "font/woff2"
        return response

    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    for path in ["/", *(f"/{name}" for name in names)]:
        app.add_route(path, send_file, methods=["GET"], include_in_schema=False)
