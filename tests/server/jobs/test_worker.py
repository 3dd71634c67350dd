"""Jobs that are killed between any two writes, cancelled or late at any moment: OpenAI's life cycle, and no line lost.

A kill is a copy of the data folder as it is at that moment, on which another server starts.
"""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.server.api.schema.batch import BatchObject
from moeflow.server.jobs import batch_store, file_store, journal, runner, worker
from moeflow.server.jobs.batch_store import FINAL
from tests.marks import thorough_unless
from tests.server.jobs.job_server import Clock, Server
from tests.server.jobs.requests import chat_line

NEXT = {  # OpenAI's life cycle; a waiting job is cancelled at once, and a damaged one fails
    "validating": {"failed", "in_progress", "cancelling", "cancelled"},
    "in_progress": {"finalizing", "expired", "cancelling", "failed"},
    "finalizing": {"completed"},
    "cancelling": {"cancelled"},
}
SHORT = (5, 1, 7, 3)  # tokens of answers that are there before the engine pauses, in another order
LINES = [
    *(chat_line(f"short{n}", max_tokens=n) for n in SHORT),
    chat_line("bad", top_p=9),
    *(chat_line(f"long{n}", max_tokens=20, ignore_eos=True) for n in range(3)),
]
IDS = [json.loads(line)["custom_id"] for line in LINES]
OPS_BEFORE_PAUSE = 2 + len(SHORT) + 1  # the input's description, the job's two, short answers and an error


class Kills:
    """Copies a folder before and after each write to it, and calls back before the one that was asked for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.copies: list[Path] = []
        self.at_op: Callable[[int], None] = lambda _: None
        self._folder = folder
        self._num_ops = 0
        self._is_inside = False
        for owner, name in (
            (batch_store, "write_json"),
            (file_store, "write_json"),
            (Path, "replace"),
            (Path, "unlink"),
        ):
            patch.setattr(owner, name, self._watched(getattr(owner, name)))
        write = journal._write_whole

        def write_in_parts(file, line: bytes) -> None:
            self._begin()
            write(file, line[: len(line) // 2])
            self._copy()
            write(file, line[len(line) // 2 :])

        patch.setattr(journal, "_write_whole", write_in_parts)

    def _watched(self, operation):
        def watched(path: Path, *args, **kwargs):
            if self._folder not in path.parents:
                return operation(path, *args, **kwargs)
            if operation.__name__ == "write_json":
                self._begin()
            else:
                self._copy()
            return operation(path, *args, **kwargs)

        return watched

    def _begin(self) -> None:
        self._copy()
        self.at_op(self._num_ops)
        self._num_ops += 1

    def _copy(self) -> None:
        if self._is_inside:
            return
        self._is_inside = True  # copying may write, too
        copy = self._folder.parent / f"{self._folder.name}-{len(self.copies)}"
        shutil.copytree(self._folder, copy)
        self.copies.append(copy)
        self._is_inside = False


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.001)
    monkeypatch.setattr(worker, "DISK_RETRY_S", 0.01)
    monkeypatch.setattr(runner, "SYNC_S", 3600)  # on a slow machine it would write between the operations counted here
    for module in (batch_store, file_store, journal):
        monkeypatch.setattr(module, "sync", lambda _: None, raising=False)


async def first_run(folder: Path, tokenizer, event: str | None, at_op: int) -> tuple[list[Path], Clock]:
    """Run a job to which something happens; return the folder at each moment, and the clock."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        kills = Kills(folder, patch)
        server = Server(folder, tokenizer, clock)
        server.engine.pause_after = None if event is None else 10
        loop = asyncio.get_running_loop()

        def happen() -> None:
            if event == "expire":
                clock.ahead_s = 25 * 3600
            elif event == "cancel":
                for batch in server.jobs.batches.unfinished():
                    server.jobs.worker.cancel(batch)

        kills.at_op = lambda number: loop.call_soon(happen) if number == at_op else None
        server.begin(*LINES)
        await server.finish()
        return [*kills.copies, folder], clock


async def next_run(folder: Path, tokenizer, clock: Clock) -> list[Path]:
    with pytest.MonkeyPatch.context() as patch:
        kills = Kills(folder, patch)
        await Server(folder, tokenizer, clock).finish()
        return [*kills.copies, folder]


def description(folder: Path) -> BatchObject | None:
    for file in (folder / "batches").glob("*.json"):
        return BatchObject.model_validate_json(json.dumps(json.loads(file.read_bytes())["batch"]))
    return None


def whole_lines(folder: Path) -> list[tuple[str, bytes]]:
    """Return results that are written down, wherever they are, by custom_id."""
    lines = []
    for file in (*folder.glob("batches/*.jsonl"), *folder.glob("files/*-output"), *folder.glob("files/*-errors")):
        lines += [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [(json.loads(line)["custom_id"], line) for line in lines]


def check_moves(copies: list[Path]) -> None:
    statuses = [batch.status for batch in map(description, copies) if batch is not None]
    for before, after in pairwise(statuses):
        assert before == after or after in NEXT[before], statuses


def check_end(folder: Path, kept: list[tuple[str, bytes]]) -> BatchObject:
    """Hold a finished job against its description, and against what had been written down before the last kill."""
    batch = description(folder)
    assert batch is not None
    assert batch.status in FINAL
    lines = whole_lines(folder)
    ids = [custom_id for custom_id, _ in lines]
    assert len(set(ids)) == len(ids)
    assert set(kept) <= set(lines)
    by_file = {
        name: file.read_bytes().splitlines() for name in ("output", "errors") for file in folder.glob(f"files/*-{name}")
    }
    for results in by_file.values():
        names = [json.loads(line)["custom_id"] for line in results]
        assert names == [name for name in IDS if name in names]  # the input's order
    assert (batch.output_file_id is not None, batch.error_file_id is not None) == (
        "output" in by_file,
        "errors" in by_file,
    )
    assert batch.request_counts.completed == len(by_file.get("output", []))
    assert batch.request_counts.failed == len(by_file.get("errors", []))
    if batch.status in ("completed", "expired"):
        assert sorted(ids) == sorted(IDS)
    late = [line for line in map(json.loads, by_file.get("errors", [])) if line["error"]]
    assert {line["error"]["code"] for line in late} <= {"batch_expired"}
    assert not late or batch.status in ("expired", "cancelled")
    assert getattr(batch, f"{batch.status}_at") is not None
    names = {file.name for file in (folder / "files").iterdir()}
    ids_of_files = [name for name in (batch.input_file_id, batch.output_file_id, batch.error_file_id) if name]
    assert names == {*ids_of_files, *(f"{name}.json" for name in ids_of_files)}
    assert [file.suffix for file in (folder / "batches").iterdir()] == [".json"]
    return batch


EVENTS = [(None, 0), *((event, at) for event in ("cancel", "expire") for at in range(1, OPS_BEFORE_PAUSE))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "at_op"), thorough_unless(lambda event, at_op: event != "expire" or at_op == 1, EVENTS)
)
def test_killed_between_any_two_writes(tmp_path, tokenizer, event, at_op):
    copies, clock = asyncio.run(first_run(tmp_path / "data", tokenizer, event, at_op))
    check_moves(copies)
    end = check_end(copies[-1], [])
    assert end.status == {None: "completed", "cancel": "cancelled", "expire": "expired"}[event]
    for copy in copies:
        before, kept = description(copy), whole_lines(copy)
        if before is None:
            continue
        more = asyncio.run(next_run(copy, tokenizer, clock))
        check_moves([copies[0], *more])
        batch = check_end(copy, kept)
        if before.status in FINAL:
            assert batch == before
        elif event == "cancel":
            assert batch.status == ("completed" if before.status in ("validating", "in_progress") else "cancelled")
        else:
            assert batch.status == end.status


@pytest.mark.slow
@settings(max_examples=25)
@given(event=st.sampled_from(EVENTS), kills=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_killed_again_and_again(tmp_path_factory, tokenizer, event, kills):
    folder = tmp_path_factory.mktemp("job") / "data"
    copies, clock = asyncio.run(first_run(folder, tokenizer, *event))
    for share in kills:
        copies = [copy for copy in copies if description(copy) is not None]
        folder = copies[round(share * (len(copies) - 1))]
        kept = whole_lines(folder)
        copies = asyncio.run(next_run(folder, tokenizer, clock))
    check_end(folder, kept)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["cancel", "expire", None])
@pytest.mark.parametrize("damage", ["from the first line on", "after a line", "gone"])
def test_an_input_that_is_damaged_later_costs_no_result(tmp_path, tokenizer, event, damage):
    """After a kill the input has become unreadable: a finished job ends as it should, any other fails."""
    copies, clock = asyncio.run(first_run(tmp_path / "data", tokenizer, event or "cancel", OPS_BEFORE_PAUSE - 1))
    wanted = "cancelling" if event == "cancel" else "in_progress"
    copy = [copy for copy in copies if (batch := description(copy)) and batch.status == wanted][-1]
    if not event:
        clock.ahead_s = 0
    batch, kept = description(copy), whole_lines(copy)
    assert batch is not None
    assert kept
    damage_file(copy / "files" / batch.input_file_id, damage, LINES[IDS.index(kept[0][0])])
    asyncio.run(Server(copy, tokenizer, clock).finish())
    end = description(copy)
    assert end is not None
    assert end.status == {"cancel": "cancelled", "expire": "expired", None: "failed"}[event]
    assert (end.errors is not None) == (event is None)
    assert set(kept) <= set(whole_lines(copy))
    assert end.output_file_id is not None
    # On a busy machine some come too late, and have an error.
    num_answers = sum(name.startswith("short") and json.loads(line)["error"] is None for name, line in kept)
    assert (end.request_counts.total, end.request_counts.completed) == (len(IDS), num_answers)


def damage_file(path: Path, damage: str, answered_line: bytes) -> None:
    """Spoil an input. A line that is left whole is one that has been answered: another might be answered still."""
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"oops" if damage == "from the first line on" else answered_line + b"\noops")


def test_cancelled_while_it_is_checked_and_wrong(tmp_path, tokenizer):
    """The check finds problems in a job that was cancelled meanwhile: it ends as cancelled, not as failed."""

    async def run() -> BatchObject:
        server = Server(tmp_path / "data", tokenizer, Clock())
        batch = server.begin(b"oops")
        server.jobs.worker.wake()
        while server.jobs.worker._current is None:
            await asyncio.sleep(0)
        assert batch.status == "validating"
        server.jobs.worker.cancel(batch)
        assert batch.status == "cancelling"
        await server.finish()
        return batch

    batch = asyncio.run(run())
    assert (batch.status, batch.output_file_id, batch.error_file_id, batch.errors) == ("cancelled", None, None, None)


def test_a_full_disk_is_waited_for(tmp_path, tokenizer, monkeypatch):
    """Failed writes change nothing; once the disk has space, the job resumes."""
    room = [40]  # every third write fails
    write_json, write_whole = batch_store.write_json, journal._write_whole

    def write(operation, *args):
        room[0] -= 1
        if room[0] % 3 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        operation(*args)

    server = Server(tmp_path / "data", tokenizer, Clock())
    server.begin(*LINES)
    monkeypatch.setattr(batch_store, "write_json", lambda *args: write(write_json, *args))
    monkeypatch.setattr(journal, "_write_whole", lambda *args: write(write_whole, *args))
    asyncio.run(server.finish())
    assert check_end(tmp_path / "data", []).status == "completed"
