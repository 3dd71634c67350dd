from __future__ import annotations

import gzip
import json
import re
import shutil
from hashlib import sha256

import pytest
from fastapi import FastAPI

from moeflow.server.page import WEB_FOLDER, add_page
from tests.server.conftest import assets_path, connect

pytestmark = pytest.mark.anyio

TYPES = {
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
FILES = sorted(file for file in WEB_FOLDER.rglob("*") if file.is_file())


async def test_the_document_names_files_that_are_there(http):
    document = await http.get("/")
    assert document.status_code == 200
    names = re.findall(r'(?:src|href)="([^"]+)"', document.text)
    assert len(names) > 40
    for name in names:
        assert not name.startswith("/")  # a proxy's prefix comes before it
        assert (await http.get(f"/{name}")).status_code == 200


@pytest.mark.parametrize("suffix", sorted({file.suffix for file in FILES}))
async def test_every_file_is_served_with_its_type_and_a_strict_policy(http, suffix):
    assets = await assets_path(http)
    for file in (it for it in FILES if it.suffix == suffix):
        is_document = file.name == "index.html"
        name = file.relative_to(WEB_FOLDER).as_posix()
        response = await http.get("/" if is_document else f"{assets}/{name}")
        assert response.status_code == 200, name
        assert is_document or response.content == file.read_bytes(), name
        assert response.headers["content-type"].split(";")[0] == TYPES[suffix], name
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        cached = "no-cache" if is_document else "public, max-age=31536000, immutable"
        assert response.headers["cache-control"] == cached


@pytest.mark.parametrize("name", ["", "app.js", "style.css", "vendor/katex/katex.js"])
async def test_text_is_compressed_for_whom_takes_that(http, name):
    path = f"{await assets_path(http)}/{name}" if name else "/"
    async with http.stream("GET", path, headers={"accept-encoding": "br, gzip"}) as response:
        raw = b"".join([piece async for piece in response.aiter_raw()])
    plain = await http.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
    assert gzip.decompress(raw) == plain.content
    assert len(raw) < 0.6 * len(plain.content)


async def test_another_file_has_another_address(tmp_path):
    """Browsers keep files for ever, so no address may ever name another content."""
    folders = []
    for name in ("one", "two"):
        shutil.copytree(WEB_FOLDER, tmp_path / name)
        if name == "two":
            (tmp_path / name / "storage.js").write_text("// another\n")
        app = FastAPI()
        add_page(app, tmp_path / name)
        async with connect(app) as http:
            folders.append(await assets_path(http))
    assert folders[0] != folders[1]


async def test_all_modules_are_asked_for_at_once(http):
    """A browser that knows them from the document alone waits for one answer, not for one after each import."""
    folder = await assets_path(http)
    document = (await http.get("/")).text
    hinted = re.findall(rf'rel="modulepreload" href="{folder[1:]}/([^"]+)" fetchpriority="low"', document)
    for name in hinted:
        text = (WEB_FOLDER / name).read_text(encoding="utf-8")
        for target in re.findall(r'\bfrom "(\.[^"]+)"', text) + re.findall(r'^import "(\.[^"]+)"', text, re.MULTILINE):
            assert (WEB_FOLDER / name).parent.joinpath(target).resolve() in [
                (WEB_FOLDER / it).resolve() for it in hinted
            ]
    assert len(hinted) == len(set(hinted)) > 40


def test_libraries_are_as_they_were_fetched():
    """`scripts/vendor-web` fetches them by the hash of their archives and notes that of each file."""
    folder = WEB_FOLDER / "vendor"
    noted = json.loads((folder / "files.json").read_text(encoding="utf-8"))["files"]
    files = [file for file in FILES if file.is_relative_to(folder) and file.name != "files.json"]
    assert {file.relative_to(folder).as_posix(): sha256(file.read_bytes()).hexdigest() for file in files} == noted


async def test_an_unchanged_document_is_not_sent_again(http):
    etag = (await http.get("/")).headers["etag"]
    again = await http.get("/", headers={"if-none-match": etag})
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["cache-control"] == "no-cache"
    assert (await http.get("/", headers={"if-none-match": 'W/"other"'})).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/nothing.js", "/app.js", "/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/web/index.html", "/assets/app.js"],
)
async def test_nothing_else_is(app, path):
    async with connect(app) as http:
        assert (await http.get(path)).status_code == 404
