"""Files and batches through the official client: states, results, refusals, restarts."""

from __future__ import annotations

import asyncio
import errno
import http.client
import io
import json
import logging
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from fastapi import FastAPI
from openai.types import Batch, FileObject

from moeflow.server.jobs import batch_store, file_store
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.jobs.file_store import HIDDEN_S
from tests.server.conftest import connect
from tests.server.fake_client import NAME, REPLY
from tests.server.jobs.job_server import Clock
from tests.server.jobs.requests import CHAT, chat_line, completion_line
from tests.server.live_server import eventually, serve_in_thread
from tests.server.openai_objects import check

pytestmark = pytest.mark.slow  # real sockets, and jobs that are looked after a few times a second


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def serve(make_app: Callable[..., FastAPI], data: Path, clock: Clock):
    """Start a server on the data folder, as often as wanted; leaving it is a kill as far as the folder knows."""

    class Running:
        def __init__(self, **config) -> None:
            self.app = make_app(**config)
            self.jobs = self.app.state.jobs = Jobs(data, self.app.state.service, clock)

        def __enter__(self) -> openai.OpenAI:
            self.thread = serve_in_thread(self.app)
            self.client = openai.OpenAI(base_url=f"{self.thread.__enter__()}/v1", api_key="none", max_retries=0)
            return self.client

        def __exit__(self, *error) -> None:
            self.client.close()
            self.thread.__exit__(*error)
            self.jobs._lock.close()

    return Running


@pytest.fixture
def client(serve) -> Iterator[openai.OpenAI]:
    with serve() as client:
        yield client


def upload(client: openai.OpenAI, *lines: bytes) -> FileObject:
    content = b"".join(line + b"\n" for line in lines)
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")


def begin(client: openai.OpenAI, *lines: bytes, endpoint: str = CHAT, **more) -> Batch:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait(client: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    final = statuses or ("completed", "failed", "expired", "cancelled")
    assert eventually(lambda: client.batches.retrieve(batch.id).status in final, 10), client.batches.retrieve(batch.id)
    batch = client.batches.retrieve(batch.id)
    check(batch)
    return batch


def results(client: openai.OpenAI, file_id: str) -> dict[str, dict]:
    lines = client.files.content(file_id).text.splitlines()
    return {result["custom_id"]: result for result in map(json.loads, lines)}


def test_a_job_from_upload_to_results(client):
    lines = [chat_line(str(i), max_tokens=5 + i) for i in range(9)]
    batch = begin(client, *lines, chat_line("bad", top_p=9), metadata={"for": "test"})
    assert isinstance(batch, Batch)
    batch = wait(client, batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (10, 9, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert (batch.metadata, batch.model) == ({"for": "test"}, NAME)
    answers = results(client, batch.output_file_id)
    assert sorted(answers) == list(map(str, range(9)))
    assert REPLY.startswith(answers["3"]["response"]["body"]["choices"][0]["message"]["content"].rstrip("\ufffd"))
    assert batch.usage.output_tokens == sum(5 + i for i in range(9))
    (error,) = results(client, batch.error_file_id).values()
    assert error["response"]["status_code"] == 400
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_completions_and_several_jobs(client):
    first = begin(client, completion_line("a", max_tokens=2), endpoint="/v1/completions")
    second = begin(client, chat_line("a"))
    for batch in (first, second):
        assert wait(client, batch).status == "completed"
    page = client.batches.list(limit=1)
    assert page.has_more
    assert {batch.id for batch in client.batches.list(limit=1)} == {first.id, second.id}  # it reads on by itself


def test_an_input_that_is_none_fails_with_its_lines(client):
    batch = wait(client, begin(client, chat_line("a"), b"oops", completion_line("b"), chat_line("a")))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "mismatched_url"),
        (4, "duplicate_custom_id"),
    ]
    assert batch.output_file_id is None


def test_cancelling_keeps_what_is_done(client, engine):
    batch = wait(client, begin(client, chat_line("quick", max_tokens=2), *[chat_line(str(i)) for i in range(30)]))
    assert batch.status == "completed"
    with pytest.raises(openai.ConflictError, match="completed already"):
        client.batches.cancel(batch.id)
    engine.pause_after = 3
    batch = begin(client, chat_line("quick", max_tokens=2), *[chat_line(str(i)) for i in range(30)])
    assert eventually(lambda: len(engine.live) >= 15)
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    assert list(results(client, batch.output_file_id)) == ["quick"]
    assert batch.error_file_id is None
    assert eventually(lambda: not engine.live)


def test_what_has_not_begun_is_cancelled_while_another_runs(client, engine):
    engine.pause_after = 3
    running = begin(client, *[chat_line(str(i)) for i in range(3)])
    assert eventually(lambda: len(engine.live) >= 3)
    queued = begin(client, chat_line("a"))
    batch = client.batches.cancel(queued.id)
    check(batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    engine.pause_after = None
    assert wait(client, running).status == "completed"
    assert client.batches.retrieve(queued.id).status == "cancelled"


def test_time_runs_out(client, engine, clock):
    engine.pause_after = 3
    batch = begin(client, chat_line("quick", max_tokens=2), chat_line("a"), chat_line("b"))
    assert eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
    clock.ahead_s = 25 * 3600
    batch = wait(client, batch)
    assert (batch.status, batch.request_counts.failed) == ("expired", 2)
    errors = results(client, batch.error_file_id)
    assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}
    assert list(results(client, batch.output_file_id)) == ["quick"]


def test_a_server_that_is_killed_goes_on_after_its_restart(serve, engine):
    lines = [chat_line(str(i), max_tokens=2 if i < 5 else 20, ignore_eos=True) for i in range(40)]
    engine.pause_after = 3
    with serve() as client:
        batch = begin(client, *lines)
        waiting = begin(client, chat_line("later"))
        assert eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5)
    assert eventually(lambda: not engine.live)
    engine.pause_after = None
    num_before = len(engine.submissions)
    running = serve()
    with running as client:
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        begin(
            client, chat_line("x")
        )  # a whole server looks for work once its model is loaded; this one has to be asked
        batch, waiting = wait(client, batch), wait(client, waiting)
        assert (batch.status, waiting.status) == ("completed", "completed")
        assert batch.request_counts.completed == 40
        assert len(results(client, batch.output_file_id)) == 40
    assert len(engine.submissions) - num_before == 35 + 1 + 1


def test_a_job_waits_for_its_model(serve, engine, clock):
    engine.pause_after = 1
    with serve() as client:
        batch = begin(client, chat_line("a"))
        assert eventually(lambda: bool(engine.live))
    engine.pause_after = None
    model, engine.model = engine.model, engine.model.__class__(**{**_fields(engine.model), "name": "another"})
    with serve() as client:
        other = begin(client, chat_line("b"))
        assert wait(client, other).status == "completed"
        assert client.batches.retrieve(batch.id).status == "in_progress"
    engine.model = model
    with serve() as client:
        begin(client, chat_line("c"))
        assert wait(client, batch).status == "completed"


def _fields(model) -> dict:
    return {name: getattr(model, name) for name in model.__struct_fields__}


def test_files(client, clock, data):
    file = upload(client, b"hello")
    check(file)
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", 6, "batch")
    assert client.files.content(file.id).read() == b"hello\n"
    short = client.files.create(
        file=("../../x", b"y"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (short.filename, short.expires_at) == ("x", short.created_at + 3600)
    assert {each.id for each in client.files.list()} == {file.id, short.id}
    assert list(client.files.list(purpose="batch_output")) == []
    clock.ahead_s = 4000
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(short.id)
    assert [each.id for each in client.files.list()] == [file.id]
    clock.ahead_s += HIDDEN_S
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert list((data / "files").iterdir()) == []


def brief_file(client: openai.OpenAI, content: bytes = b"kept") -> FileObject:
    expiry = {"anchor": "created_at", "seconds": 3600}
    return client.files.create(file=("x", content), purpose="batch", expires_after=expiry)


def test_a_clock_that_is_set_while_the_server_runs_expires_nothing(client, engine, clock):
    engine.pause_after = 3
    batch = begin(client, chat_line("a"))
    file = brief_file(client)
    clock.wall_ahead_s = 60 * 24 * 3600
    assert client.files.content(file.id).read() == b"kept"
    engine.pause_after = None
    assert wait(client, batch).status == "completed"


def test_a_file_that_expired_by_a_wrong_clock_is_back_once_the_clock_is_right(serve, clock):
    with serve() as client:
        file = brief_file(client)
    for wall_ahead_s in (60 * 24 * 3600, 0):
        clock.wall_ahead_s = wall_ahead_s
        clock.restart()
        with serve() as client:
            if wall_ahead_s:
                with pytest.raises(openai.NotFoundError):
                    client.files.retrieve(file.id)
                assert list(client.files.list()) == []
            else:
                assert client.files.content(file.id).read() == b"kept"


def test_expired_files_make_room_for_an_upload(serve, clock):
    content = b"x" * 700
    with serve(file_quota_bytes=1024) as client:
        file = brief_file(client, content)
        with pytest.raises(openai.APIStatusError, match="all files together may have"):
            upload(client, content)
        clock.ahead_s = 4000
        assert upload(client, content).bytes == 701
        clock.ahead_s = 0
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def test_refusals(client):
    file = upload(client, chat_line("a"))
    for error, request in (
        (openai.BadRequestError, lambda: client.files.create(file=b"x", purpose="vision")),
        (openai.NotFoundError, lambda: client.files.retrieve("file-none")),
        (openai.NotFoundError, lambda: client.files.content("..%2Flock")),
        (openai.NotFoundError, lambda: client.batches.retrieve("batch_none")),
        (openai.NotFoundError, lambda: client.batches.cancel("batch_none")),
        (openai.NotFoundError, lambda: _create(client, "file-none")),
        (openai.BadRequestError, lambda: _create(client, file.id, endpoint="/v1/embeddings")),
        (openai.BadRequestError, lambda: _create(client, file.id, completion_window="1h")),
        (openai.BadRequestError, lambda: _create(client, file.id, metadata={"a": "b" * 513})),
        (openai.NotFoundError, lambda: client.batches.list(after="batch_none")),
        (openai.NotFoundError, lambda: client.files.list(after="file-none")),
    ):
        with pytest.raises(error) as caught:
            request()
        assert caught.value.body["message"]


def _create(client: openai.OpenAI, file_id: str, **changes) -> Batch:
    values = {"endpoint": CHAT, "completion_window": "24h", **changes}
    return client.batches.create(input_file_id=file_id, **values)


def test_a_file_that_is_too_large(serve):
    with serve(max_file_bytes=100_000) as client, pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=b"x" * 200_000, purpose="batch")
    assert caught.value.status_code == 413


def test_a_file_that_is_too_large_is_refused_by_its_announcement(serve, data):
    """The body is not read, and the client still gets to know why."""
    with serve(max_file_bytes=100_000) as client:
        connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Content-Type", "multipart/form-data; boundary=b")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert "files may have 97.7 KiB here; split it" in answer.read().decode()
        connection.close()
        assert list((data / "files").iterdir()) == []


def test_an_upload_that_is_cut_off_leaves_nothing_and_is_no_failure(serve, data, caplog):
    with serve() as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n"
            form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 2_000_000
            connection.sendall(head + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + form)
        assert list(client.files.list()) == []
    assert list((data / "files").iterdir()) == []
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_uploads_lie_in_the_data_folder_while_they_come(serve, data, monkeypatch):
    """A temporary folder may be memory; and space for one copy is enough."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    sizes, add = [], file_store.FileStore.add

    def look_and_add(self, *args):
        sizes.append([path.stat().st_size for path in (data / "files").iterdir()])
        return add(self, *args)

    monkeypatch.setattr(file_store.FileStore, "add", look_and_add)
    with serve() as client:
        assert client.files.create(file=b"x" * 3_000_000, purpose="batch").bytes == 3_000_000
    assert sizes == [[3_000_000]]


@pytest.mark.parametrize("num_bytes", [1, 3_000_000])
def test_an_upload_that_the_disk_does_not_take_leaves_nothing(serve, data, monkeypatch, num_bytes):
    def full(prefix: str, _now_s: float) -> str:
        (data / "files" / f"{prefix}full").symlink_to("/dev/full")
        return f"{prefix}full"

    monkeypatch.setattr(file_store, "new_id", full)
    with serve() as client:
        with pytest.raises(openai.InternalServerError, match="No space left on device; make room there") as caught:
            client.files.create(file=b"x" * num_bytes, purpose="batch")
        assert caught.value.status_code == 507
    assert list((data / "files").iterdir()) == []


def test_what_the_disk_does_not_take_is_refused_and_changes_nothing(client, data, engine, monkeypatch):
    engine.pause_after = 3
    batch = begin(client, chat_line("a"))
    assert eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(batch_store, "write_json", refuse)
        patch.setattr(file_store, "write_json", refuse)
        for request in (
            lambda: upload(client, b"x"),
            lambda: _create(client, batch.input_file_id),
            lambda: client.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.InternalServerError, match="No space left on device; make room there") as caught:
                request()
            assert caught.value.status_code == 507
    assert client.batches.retrieve(batch.id).status == "in_progress"
    assert {each.id for each in client.files.list()} == {batch.input_file_id}
    assert len(list((data / "files").iterdir())) == 2
    engine.pause_after = None
    assert wait(client, batch).status == "completed"


def test_lists_are_in_the_order_in_which_things_came(client):
    files = [upload(client, b"x").id for _ in range(12)]
    assert [file.id for file in client.files.list(limit=5)] == files[::-1]  # it reads on by itself
    assert [file.id for file in client.files.list(order="asc")] == files


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches/x/cancel"),
    ],
)
async def test_every_route_asks_for_the_key(make_app, method, path):
    async with connect(make_app(api_key="k")) as http:
        assert (await http.request(method, path)).status_code == 401


@pytest.mark.anyio
async def test_forms_that_are_none(make_app, data):
    app = make_app()
    jobs = app.state.jobs = Jobs(data, app.state.service)
    async with connect(app) as http:
        assert (await http.post("/v1/files", json={})).status_code == 415
        form = {"Content-Type": "multipart/form-data"}
        assert (await http.post("/v1/files", content=b"x", headers=form)).status_code == 400
        form = {"Content-Type": "multipart/form-data; boundary=b"}
        assert (await http.post("/v1/files", content=b"--b\r\nnonsense", headers=form)).status_code == 400
        answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})
        assert "a file is needed" in answer.json()["error"]["message"]
        for name, value in (("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "3600")):
            answer = await http.post("/v1/files", data={"purpose": "batch", name: value}, files={"file": b"x"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after[anchor]")
        answer = await http.post("/v1/files", data={"purpose": "batch", "ttl": "1"}, files={"file": b"x"})
        assert "unknown field 'ttl'" in answer.json()["error"]["message"]
    await jobs.close()
    await asyncio.sleep(0)


@pytest.mark.anyio
async def test_without_a_data_folder_there_are_no_files(http):
    for path in ("/v1/files", "/v1/batches"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_data_folder")
