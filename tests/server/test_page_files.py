from __future__ import annotations

import json
from hashlib import sha256

import pytest

from moeflow.server.page import WEB_FOLDER
from tests.server.conftest import connect

pytestmark = pytest.mark.anyio

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
FILES = sorted(file for file in WEB_FOLDER.rglob("*") if file.is_file())


async def test_the_page_is_at_the_root(http):
    response = await http.get("/")
    assert response.status_code == 200
    assert response.content == (WEB_FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(WEB_FOLDER).as_posix())
async def test_every_file_is_served_with_its_type_and_a_strict_policy(http, file):
    response = await http.get(f"/{file.relative_to(WEB_FOLDER).as_posix()}")
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == TYPES[file.suffix]
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


def test_libraries_are_as_they_were_fetched():
    """`scripts/vendor-web` fetches them by the hash of their archives and notes that of each file."""
    folder = WEB_FOLDER / "vendor"
    noted = json.loads((folder / "files.json").read_text(encoding="utf-8"))["files"]
    files = [file for file in FILES if file.is_relative_to(folder) and file.name != "files.json"]
    assert {file.relative_to(folder).as_posix(): sha256(file.read_bytes()).hexdigest() for file in files} == noted


async def test_an_unchanged_file_is_not_sent_again(http):
    etag = (await http.get("/app.js")).headers["etag"]
    again = await http.get("/app.js", headers={"if-none-match": etag})
    assert again.status_code == 304
    assert again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/nothing.js", "/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/web/index.html"])
async def test_nothing_else_is(app, path):
    async with connect(app) as http:
        assert (await http.get(path)).status_code == 404
