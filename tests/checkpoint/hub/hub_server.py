"""A hub on loopback that speaks the real one's protocol: list of files, redirects to a content network, ranges, ETags.

The content network is a server of its own at another address, so that clients must drop the token at the redirect. It
can cut connections after some bytes, or be slow. `requests` has all requests.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", "tokenizer.json")
TOKEN = "hf_right"
OTHER_TOKEN = "hf_other"  # of an account that may read nothing special


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None
    on_cdn: bool


@dataclass
class RemoteRepository:
    files: dict[str, bytes]
    gated: bool = False  # closed but for a token
    private: bool = False  # and unknown without one
    branches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.commits = {self.commit: self.files}
        self.branches.setdefault("main", self.commit)

    @property
    def commit(self) -> str:
        return commit_of(self.files)

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a new commit of these files on a branch."""
        commit = commit_of(files)
        self.commits[commit], self.branches[branch] = files, commit
        return commit


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


def checksum(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_lfs(path) else blob_id(data)


class Hub:
    """The repositories, and how the network behaves."""

    def __init__(self) -> None:
        self.repositories: dict[str, RemoteRepository] = {}
        self.requests: list[Request] = []
        self.cuts_left = 0  # how many more answers of the content network are cut at random
        self.num_cuts = 0
        self.chunk_bytes = 1 << 16
        self.wait_s = 0.0  # after each chunk
        self.damages = 0  # how many more answers of the content network have a wrong byte
        self.knows_ranges = True
        self.statuses: list[int] = []  # that the content network answers first
        self.nonsense: dict[str, tuple[int, dict[str, str], bytes]] = {}  # whole answers, by how a path begins
        self.random = random.Random(0)
        self.lock = threading.Lock()
        self.url = self.cdn_url = ""

    def add(self, repo: str, files: dict[str, bytes], **facts) -> RemoteRepository:
        self.repositories[repo] = RemoteRepository(files, **facts)
        return self.repositories[repo]

    def add_folder(self, repo: str, folder: Path, **facts) -> RemoteRepository:
        files = {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}
        return self.add(repo, files, **facts)

    def sent(self, *, on_cdn: bool = True) -> list[Request]:
        return [it for it in self.requests if it.on_cdn is on_cdn]

    def next_cut(self, num_bytes: int) -> int | None:
        """Return after how many of its bytes an answer is cut; None: it is not."""
        with self.lock:
            if not self.cuts_left:
                return None
            self.cuts_left -= 1
            self.num_cuts += 1
            return self.random.randrange(num_bytes)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub, "protocol_version": "HTTP/1.1"}))
        for kind in (_Api, _Cdn)
    ]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.daemon_threads = True
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def hub_of_this_process(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Have the hub library in this process take a hub of our own for the real one, and `cache` for its cache."""
    with running_hub() as hub:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    on_cdn = False

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.hub.requests.append(Request(self.command, self.path, self.headers.get("Range"), token, self.on_cdn))
        path = unquote(urlsplit(self.path).path)
        nonsense = next((it for start, it in self.hub.nonsense.items() if path.startswith(start)), None)
        try:
            if nonsense is None:
                self.answer(path, token)
            else:
                self.send(*nonsense)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def answer(self, path: str, token: str | None) -> None:
        raise NotImplementedError

    def send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, data: bytes, headers: dict[str, str]) -> None:
        """Send a file or a range of it; the content network may cut the connection before its end."""
        start, stop, status = 0, len(data), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.hub.knows_ranges:
            start, stop = int(asked[1]), min(int(asked[2] or len(data) - 1) + 1, len(data))
            if start >= len(data):
                self.send(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            status, headers = 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self.send_response(status)
        for name, value in {"Content-Length": str(stop - start), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.next_cut(stop - start) if self.on_cdn else None
        end = stop if cut is None else start + cut
        for at in range(start, end, self.hub.chunk_bytes):
            self.wfile.write(data[at : min(at + self.hub.chunk_bytes, end)])
            time.sleep(self.hub.wait_s)
        if cut is not None:
            self.close_connection = True
            if self.hub.random.random() < 0.5:  # a reset, at other times an orderly end, too early
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, *_: object) -> None:
        pass


class _Api(_Handler):
    def answer(self, path: str, token: str | None) -> None:
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path)
        if info:
            self.answer_info(info[1], info[2] or "revision", info[3] or "main", token)
        elif file:
            self.answer_file(file[1], file[2], token)
        else:
            self.send(404, {})

    def find(self, repo: str, token: str | None) -> RemoteRepository | None:
        found = self.hub.repositories.get(repo)
        if token not in (None, TOKEN, OTHER_TOKEN):
            self.send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return None
        if found is None or (found.private and token != TOKEN):
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self.send(404 if token else 401, headers)
            return None
        return found

    def answer_info(self, repo: str, what: str, revision: str, token: str | None) -> None:
        found = self.find(repo, token)
        if found is None:
            return
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
            return
        entries = [_entry(name, data, is_tree=what == "tree") for name, data in found.commits[commit].items()]
        body = entries if what == "tree" else {"id": repo, "modelId": repo, "sha": commit, "siblings": entries}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def answer_file(self, repo: str, rest: str, token: str | None) -> None:
        found = self.find(repo, token)
        if found is None:
            return
        names = sorted([*found.branches, *found.commits], key=len, reverse=True)
        revision = next((name for name in names if rest.startswith(name + "/")), None)
        if revision is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        path, commit = rest[len(revision) + 1 :], found.branches.get(revision, revision)
        data = found.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if data is None:
            self.send(404, headers | {"X-Error-Code": "EntryNotFound"})
        elif found.gated and token != TOKEN:
            status = 403 if token else 401
            self.send(
                status, headers | {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {repo} is restricted"}
            )
        elif is_lfs(path):
            etag = checksum(path, data)
            where = f"{self.hub.cdn_url}/{repo}/{etag}?Expires=1&Signature=x"
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)), "Location": where}
            self.send(302, headers | linked | {"ETag": f'"{blob_id(data)[:8]}"'})
        else:
            self.send_file(data, headers | {"ETag": f'"{blob_id(data)}"'})


class _Cdn(_Handler):
    on_cdn = True

    def answer(self, path: str, token: str | None) -> None:
        repo, _, etag = path[1:].rpartition("/")
        files = [item for files in self.hub.repositories[repo].commits.values() for item in files.items()]
        data = next((data for name, data in files if checksum(name, data) == etag), None)
        if token is not None or data is None:
            self.send(400, {})  # as S3 does where two kinds of authorization meet
        elif self.hub.statuses:
            self.send(self.hub.statuses.pop(0), {})
        else:
            if self.hub.damages:
                self.hub.damages -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            self.send_file(data, {"ETag": f'"{etag}"'})


def _entry(path: str, data: bytes, *, is_tree: bool) -> dict[str, object]:
    sha256 = hashlib.sha256(data).hexdigest()
    if is_tree:
        lfs = {"oid": sha256, "size": len(data), "pointerSize": 134}
        entry = {"type": "file", "path": path, "oid": blob_id(data), "size": len(data)}
    else:
        lfs = {"sha256": sha256, "size": len(data), "pointerSize": 134}
        entry = {"rfilename": path, "blobId": blob_id(data), "size": len(data)}
    return entry | ({"lfs": lfs} if is_lfs(path) else {})
