"""A disk that damages something of a job: that job fails with a reason for its client, and all others are served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.server.api.paging import page
from moeflow.server.api.schema.batch import BatchList, BatchObject
from moeflow.server.api.schema.file import FileList
from moeflow.server.jobs import worker
from moeflow.server.jobs.batch_store import result_file_ids
from tests.server.jobs.job_server import Clock, Server
from tests.server.jobs.requests import chat_line

SHORT = [chat_line(f"short{n}", max_tokens=2) for n in range(4)]
LONG = [chat_line(f"long{n}", max_tokens=20, ignore_eos=True) for n in range(2)]
PAUSE_AFTER = 4  # tokens: short answers are there, long ones never come


class Folder:
    """A data folder left by a killed server: a finished job, one that was running, one that waited."""

    def __init__(self, path: Path, done: BatchObject, running: BatchObject, waiting: BatchObject) -> None:
        self.path = path
        self.done, self.running, self.waiting = done, running, waiting

    @property
    def ids(self) -> set[str]:
        return {self.done.id, self.running.id, self.waiting.id}

    def description(self, batch: BatchObject) -> Path:
        return self.path / "batches" / f"{batch.id}.json"

    def copied_to(self, path: Path) -> Folder:
        shutil.copytree(self.path, path)
        return Folder(path, self.done, self.running, self.waiting)


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.001)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tokenizer) -> Folder:
    """Leave it once a module: tests change copies."""

    async def run() -> Folder:
        server = Server(tmp_path_factory.mktemp("jobs") / "data", tokenizer, Clock())
        done = server.begin(*SHORT)
        await server.finish()
        server = Server(server_folder, tokenizer, Clock())
        server.engine.pause_after = PAUSE_AFTER
        running, waiting = server.begin(*SHORT, *LONG), server.begin(*SHORT)
        server.jobs.worker.wake()
        while running.request_counts.completed < len(SHORT):
            await asyncio.sleep(0.001)
            journal, _ = server.jobs.batches.journal_paths(running)
            if journal.exists():
                running.request_counts.completed = journal.read_bytes().count(b"\n")
        await server.jobs.close()
        return Folder(server_folder, server.jobs.batches.find(done.id) or done, running, waiting)

    server_folder = tmp_path_factory.getbasetemp() / "jobs0" / "data"
    return asyncio.run(run())


@pytest.fixture
def folder(killed, tmp_path) -> Folder:
    return killed.copied_to(tmp_path / "data")


def finish(folder: Folder, tokenizer) -> dict[str, BatchObject]:
    """Start a server on the folder and let it do all it can; return its jobs as clients get them."""

    async def run() -> dict[str, BatchObject]:
        server = Server(folder.path, tokenizer, Clock())
        await server.finish()
        BatchList.model_validate(page(server.jobs.batches.all(), None, 100, kind="batch"))
        FileList.model_validate(page(server.jobs.files.all(), None, 100, kind="file"))
        return {batch.id: batch for batch in server.jobs.batches.all()}

    return asyncio.run(run())


def check_failed(batch: BatchObject, folder: Folder, code: str) -> None:
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    (problem,) = batch.errors.data
    assert problem.code == code
    for word in ("/", "data", "output file", "move", "--"):
        assert word not in problem.message.replace("damaged", "")
    assert str(folder.path) not in problem.message


def whole(batch: BatchObject, folder: Folder) -> None:
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    assert (folder.path / "files" / batch.output_file_id).read_bytes().count(b"\n") == batch.request_counts.total


def test_without_damage_all_go_on(folder, tokenizer):
    for batch in finish(folder, tokenizer).values():
        whole(batch, folder)


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"oops", b'{"batch": 1}', b"\xff\xfe\0\0", bytes(500), "cut", "other", "folder"]
)
def test_a_damaged_description_fails_its_job_alone(folder, tokenizer, damage, caplog):
    path = folder.description(folder.running)
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "other":
            path.write_bytes(folder.description(folder.waiting).read_bytes())
        case "folder":
            path.mkdir()
        case _:
            path.write_bytes(damage)
    jobs = finish(folder, tokenizer)
    assert set(jobs) == folder.ids
    check_failed(jobs[folder.running.id], folder, "description_damaged")
    assert abs(jobs[folder.running.id].created_at - folder.running.created_at) <= 1
    assert str(path) in caplog.text
    assert jobs[folder.done.id] == folder.done
    whole(jobs[folder.waiting.id], folder)
    output = result_file_ids(folder.running)[0]
    assert jobs[folder.running.id].output_file_id == output
    assert (folder.path / "files" / output).read_bytes().count(b"\n") == len(SHORT)
    assert finish(folder, tokenizer) == jobs  # and so it stays
    assert len(list((folder.path / "batches").glob("*.damaged"))) == 1


def test_killed_before_the_failure_is_written_down(folder, tokenizer):
    path = folder.description(folder.running)
    path.replace(path.with_suffix(".damaged"))
    check_failed(finish(folder, tokenizer)[folder.running.id], folder, "description_damaged")


@pytest.mark.slow
@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), which=st.sampled_from(["done", "running"]))
def test_any_byte_of_a_description(killed, tokenizer, tmp_path_factory, where, flip, which):
    """What cannot be read fails; what can still be read is at most wrong about its own job."""
    folder = killed.copied_to(tmp_path_factory.mktemp("flip") / "data")
    path = folder.description(getattr(folder, which))
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= flip
    path.write_bytes(content)
    server = Server(folder.path, tokenizer, Clock())
    BatchList.model_validate(page(server.jobs.batches.all(), None, 100, kind="batch"))
    jobs = {batch.id: batch for batch in server.jobs.batches.all()}
    assert set(jobs) == folder.ids
    assert jobs[folder.waiting.id] == folder.waiting
    asyncio.run(server.jobs.close())


@pytest.mark.parametrize("damage", [b"oops\n", b"\xff\n", b"\0" * 50 + b"\n", "twice"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_result_fails_its_job_alone(folder, tokenizer, damage, number, caplog):
    journal = folder.path / "batches" / f"{folder.running.id}.output.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number - 1] if damage == "twice" else damage
    journal.write_bytes(b"".join(lines))
    jobs = finish(folder, tokenizer)
    batch = jobs[folder.running.id]
    check_failed(batch, folder, "results_damaged")
    assert f"{journal}: line" in caplog.text
    assert batch.request_counts.completed == len(SHORT) - 1
    assert batch.output_file_id is not None
    assert (folder.path / "files" / batch.output_file_id).read_bytes() == b"".join(lines)
    whole(jobs[folder.waiting.id], folder)


@pytest.mark.parametrize("damage", [b"", b'{"id": 1}', b"\xff"])
def test_a_damaged_description_of_a_file_loses_no_content(folder, tokenizer, damage, caplog):
    file_id = folder.done.output_file_id
    path = folder.path / "files" / file_id
    before = path.read_bytes()
    path.with_suffix(".json").write_bytes(damage)
    jobs = finish(folder, tokenizer)
    assert [batch.status for batch in jobs.values()] == ["completed"] * 3
    assert path.read_bytes() == before
    assert f"{file_id}.json is damaged" in caplog.text

    async def delete() -> None:
        server = Server(folder.path, tokenizer, Clock())
        file = server.jobs.files.find(file_id)
        assert (file.bytes, file.purpose, file.filename) == (len(before), "batch_output", file_id)
        server.jobs.files.delete(file_id)
        await server.jobs.close()

    asyncio.run(delete())
    assert not [name for name in (folder.path / "files").iterdir() if name.name.startswith(file_id)]


def test_a_failure_that_nobody_foresaw_tells_clients_no_path(folder, tokenizer, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise ValueError(f"something with {folder.path}")

    monkeypatch.setattr(worker, "run_job", fail)
    jobs = finish(folder, tokenizer)
    check_failed(jobs[folder.running.id], folder, "internal_error")
