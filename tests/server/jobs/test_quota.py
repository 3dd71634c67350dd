"""The quota for the sum of all files: counted during uploads, several at once, results of jobs included."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from moeflow.core.units import KIB
from moeflow.server.jobs.data_folder import Jobs
from tests.server.conftest import connect

QUOTA = 512 * KIB
HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
)
TAIL = b"\r\n--b--\r\n"

pytestmark = pytest.mark.anyio


@pytest.fixture
def jobs(make_app, tmp_path) -> Jobs:
    app = make_app(file_quota_bytes=QUOTA)
    jobs = app.state.jobs = Jobs(tmp_path / "data", app.state.service)
    jobs.app = app
    return jobs


async def upload(http: httpx.AsyncClient, num_bytes: int, *, length: int | None = None) -> httpx.Response:
    """Send a file piece by piece; others get to run after each."""

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        for start in range(0, num_bytes, 16 * KIB):
            await asyncio.sleep(0)
            yield b"x" * min(16 * KIB, num_bytes - start)
        yield TAIL

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    if length is not None:
        headers["Content-Length"] = str(length)
    return await http.post("/v1/files", content=body(), headers=headers)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "data" / "files").iterdir() if path.suffix != ".json")


async def test_the_quota_is_exact_and_what_is_deleted_makes_room(jobs, tmp_path):
    async with connect(jobs.app) as http:
        first = (await upload(http, QUOTA - 1000)).json()["id"]
        answer = await upload(http, 1001)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_quota_exceeded")
        assert "all files together may have 512.0 KiB here" in answer.json()["error"]["message"]
        assert "delete files" in answer.json()["error"]["message"]
        assert (await upload(http, 1000)).status_code == 200
        assert (await upload(http, 1)).status_code == 413
        assert on_disk(tmp_path) == QUOTA
        assert (await http.delete(f"/v1/files/{first}")).status_code == 200
        assert (await upload(http, QUOTA - 1000)).status_code == 200
    await jobs.close()


async def test_uploads_at_once_share_it(jobs, tmp_path):
    async with connect(jobs.app) as http:
        answers = await asyncio.gather(*[upload(http, QUOTA // 3) for _ in range(12)])
        statuses = sorted(answer.status_code for answer in answers)
        kept = statuses.count(200)
        assert kept <= 3
        assert statuses == [200] * kept + [413] * (12 - kept)
        assert on_disk(tmp_path) == kept * (QUOTA // 3)
        while (await upload(http, QUOTA // 3)).status_code == 200:  # refused uploads hold no space
            kept += 1
        assert kept == 3
    await jobs.close()


async def test_an_announced_size_is_refused_before_it_comes(jobs):
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield HEAD

    async with connect(jobs.app) as http:
        headers = {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": str(QUOTA + 100 * KIB)}
        answer = await http.post("/v1/files", content=body(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"], read) == (413, "file_quota_exceeded", 0)
    await jobs.close()


async def test_results_count_finished_or_not(jobs, tmp_path):
    async with connect(jobs.app) as http:
        given = {"endpoint": "/v1/chat/completions", "model": "fake-model", "metadata": None, "output_lifetime_s": None}
        batch = jobs.batches.create(**given, input_file_id="file-none")
        jobs.batches.journal_paths(batch)[0].write_bytes(bytes(QUOTA // 2))
        answer = await upload(http, QUOTA // 2 + 1)
        assert (answer.status_code, "have 256.0 KiB" in answer.json()["error"]["message"]) == (413, True)
        jobs.batches.change(batch, outcome="cancelled")
        jobs.worker._finish(batch)
        assert (await upload(http, QUOTA // 2 + 1)).status_code == 413
        assert (await http.delete(f"/v1/files/{batch.output_file_id}")).status_code == 200
        assert (await upload(http, QUOTA // 2 + 1)).status_code == 200
    await jobs.close()


async def test_what_fails_otherwise_holds_no_room(jobs, tmp_path):
    async with connect(jobs.app) as http:
        for _ in range(3):
            form = {"Content-Type": "multipart/form-data; boundary=b"}
            wrong = HEAD.replace(b"batch", b"vision") + b"x" * (QUOTA // 2) + TAIL
            assert (await http.post("/v1/files", content=wrong, headers=form)).status_code == 400
        assert on_disk(tmp_path) == 0
        assert (await upload(http, QUOTA)).status_code == 200
    await jobs.close()


async def test_folders_are_readable_by_their_owner_alone(make_app, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    for name in ("a/b/data", "mine"):
        jobs = Jobs(tmp_path / name, make_app().state.service)
        await jobs.close()
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes.pop("mine") == 0o755  # who makes a folder decides who may look into it
    assert {name: mode for name, mode in modes.items() if mode & 0o077 and not name.endswith("lock")} == {}
    assert len(modes) == 9, json.dumps(modes)
