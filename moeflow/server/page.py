"""Serves the page at `/`: plain static files that may connect to this server only.

The document names all other files below a folder. The name of that folder is their common hash, so browsers may keep
them forever. Every file is compressed once, at the first request.
"""

from __future__ import annotations

import gzip
import posixpath
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request, Response

WEB_FOLDER = Path(__file__).parent / "web"
_DOCUMENT = "index.html"
_ENTRY = "app.js"  # the module that imports all others
_STATIC_IMPORT = re.compile(r'^import [^;]*?"(\.[^"]+)";$', re.MULTILINE)
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
_COMPRESSED = frozenset((".woff2", ".png"))  # already
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}
_DOCUMENT_HEADERS = {
    # Trusted types: no text becomes markup, and a script only one of the page's own workers (web/workers.js).
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; manifest-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types workers",
    "Cache-Control": "no-cache",  # revalidate each time; an unchanged document then costs a 304
    **_HEADERS,
}
_ASSET_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'",  # it holds in the worker alone
    "Cache-Control": "public, max-age=31536000, immutable",
    **_HEADERS,
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page in memory."""

    name: str  # below the folder of the page
    content: bytes

    @property
    def suffix(self) -> str:
        """The end of the name, with its dot."""
        return posixpath.splitext(self.name)[1]

    @cached_property
    def gzipped(self) -> bytes:
        """The content in gzip's format."""
        return gzip.compress(self.content, mtime=0)

    def response(self, request: Request, headers: dict[str, str]) -> Response:
        """Answer with the content, compressed where the browser takes that."""
        is_compressed = self.suffix not in _COMPRESSED and "gzip" in request.headers.get("accept-encoding", "")
        return Response(
            self.gzipped if is_compressed else self.content,
            headers={**headers, "Content-Encoding": "gzip"} if is_compressed else headers,
            media_type=_TYPES[self.suffix],
        )


def add_page(app: FastAPI, folder: Path = WEB_FOLDER) -> None:
    """Add one route for every file in the folder, so that a wrong path of the API stays a 404 of the API."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {name: PageFile(name, path.read_bytes()) for path in paths if (name := path.relative_to(folder).as_posix())}
    document = files.pop(_DOCUMENT)
    assets = f"assets/{_common_hash(files)}"
    filled = _filled(document, assets, files)
    headers = {**_DOCUMENT_HEADERS, "ETag": f'W/"{sha256(filled.content).hexdigest()[:16]}"'}
    app.add_route("/", _sender(filled, headers), methods=["GET"], include_in_schema=False)
    for name, file in files.items():
        app.add_route(f"/{assets}/{name}", _sender(file, _ASSET_HEADERS), methods=["GET"], include_in_schema=False)


def _sender(file: PageFile, headers: dict[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        if "ETag" in headers and headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return file.response(request, headers)

    return send


def _common_hash(files: dict[str, PageFile]) -> str:
    digest = sha256()
    for name, file in files.items():
        digest.update(f"{name} {len(file.content)}\n".encode())
        digest.update(file.content)
    return digest.hexdigest()[:16]


def _filled(document: PageFile, assets: str, files: dict[str, PageFile]) -> PageFile:
    """Return the document with the folder of the files, and with a hint to load all modules at once.

    Addresses are relative, so the page works below a proxy's prefix.
    """
    link = '<link rel="modulepreload" href="%s/%s" fetchpriority="low">'  # styles paint the page, so they come first
    hints = "\n  ".join(link % (assets, name) for name in _modules(files))
    text = document.content.decode().replace("<!-- modules -->", hints).replace("{assets}", assets)
    return PageFile(document.name, text.encode())


def _modules(files: dict[str, PageFile]) -> list[str]:
    """Return the names of all modules that the page imports before it starts."""
    found = [_ENTRY]
    for name in found:
        for target in _STATIC_IMPORT.findall(files[name].content.decode()):
            imported = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            if imported not in found:
                found.append(imported)
    return found
