"""The journal is cut anywhere and torn by its last write; no request is ever lost or answered twice."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.server.jobs.journal import ResultJournal
from tests.server.jobs.requests import read_lines

IDS = {name: f"batch_req_{name * 24}" for name in "abcdef"}
MODEL = "m"


def answer(text: str = "x") -> dict:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    return {"id": "cmpl-1", "model": MODEL, "text": text, "usage": usage}


def open_journal(folder, ids=IDS, model=MODEL) -> ResultJournal:
    return ResultJournal(folder / "out.jsonl", folder / "err.jsonl", ids, model)


def write(journal: ResultJournal, name: str) -> None:
    if name in "ace":
        journal.write_answer(name, "cmpl-1", answer("ü\n" * 5))
    elif name == "b":
        journal.write_refusal(name, "req-1", 400, {"error": {"message": "no"}})
    else:
        journal.write_failure(name, "batch_expired", "too late")


def test_a_job_in_one_go(tmp_path):
    with open_journal(tmp_path) as journal:
        for name in IDS:
            write(journal, name)
        journal.sync()
    assert (journal.totals.completed, journal.totals.failed) == (3, 3)
    assert (journal.totals.prompt_tokens, journal.totals.cached_tokens, journal.totals.completion_tokens) == (9, 3, 6)
    first, *_ = read_lines(tmp_path / "out.jsonl")
    response = {"status_code": 200, "request_id": "cmpl-1", "body": answer("ü\n" * 5)}
    assert first == {"id": IDS["a"], "custom_id": "a", "response": response, "error": None}
    refusal, failure, _ = read_lines(tmp_path / "err.jsonl")
    assert refusal["response"]["status_code"] == 400
    assert (failure["response"], failure["error"]["code"]) == (None, "batch_expired")


@settings(max_examples=60)
@given(
    order=st.permutations(list(IDS)),
    kills=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), max_size=6),
)
def test_cut_anywhere_it_goes_on_with_what_is_whole(tmp_path_factory, order, kills):
    folder = tmp_path_factory.mktemp("job")
    for num_written, share_of_last_line in kills:
        with open_journal(folder) as journal:
            for name in [name for name in order if name not in journal.done][:num_written]:
                write(journal, name)
        for file in folder.iterdir():
            content = file.read_bytes()
            last = content.rstrip(b"\n").rfind(b"\n") + 1
            file.write_bytes(content[: last + round((len(content) - last) * share_of_last_line)])
    with open_journal(folder) as journal:
        for name in [name for name in order if name not in journal.done]:
            write(journal, name)
    assert sorted(line["custom_id"] for file in folder.iterdir() for line in read_lines(file)) == sorted(IDS)
    assert len(journal.done) == journal.totals.completed + journal.totals.failed == len(IDS)
    with open_journal(folder) as journal:
        journal.put_in_order()
    assert [line["custom_id"] for name in ("out", "err") for line in read_lines(folder / f"{name}.jsonl")] == [
        *"acebdf"
    ]


def test_put_in_order_a_link_stays_one_and_a_full_disk_changes_nothing(tmp_path):
    target = tmp_path / "elsewhere.jsonl"
    target.touch(mode=0o640)
    (tmp_path / "out.jsonl").symlink_to(target)
    with open_journal(tmp_path) as journal:
        for name in "eca":
            write(journal, name)
        before = target.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                journal.put_in_order()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert target.read_bytes() == before
        journal.put_in_order()
    assert [line["custom_id"] for line in read_lines(target)] == [*"ace"]
    assert (tmp_path / "out.jsonl").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere.jsonl", "out.jsonl"]


def test_zeros_that_a_loss_of_power_leaves_are_cut_off(tmp_path):
    with open_journal(tmp_path) as journal:
        write(journal, "a")
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(bytes(100))
    with open_journal(tmp_path) as journal:
        assert journal.done == {"a"}
    assert len(read_lines(tmp_path / "out.jsonl")) == 1


def test_files_of_another_job_are_refused_and_left_alone(tmp_path):
    with open_journal(tmp_path) as journal:
        write(journal, "a")
        write(journal, "b")
    before = (tmp_path / "out.jsonl").read_bytes()
    for ids, model, reason in (
        ({"z": "batch_req_1"}, MODEL, "line 1 answers 'a', which the input does not ask"),
        (IDS | {"a": "batch_req_1"}, MODEL, "answers another request 'a' than the input has now"),
        (IDS, "other", "was answered by 'm', but the model is 'other' now"),
    ):
        with pytest.raises(ConfigError, match=reason):
            open_journal(tmp_path, ids, model)
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes", b"my notes\nmore", b'{"custom_id": "a"}\n', b"{}"])
def test_files_of_other_programs_are_refused_and_left_alone(tmp_path, content):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="no result of a batch job; choose another output"):
        open_journal(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_a_line_that_was_copied_is_noticed(tmp_path):
    with open_journal(tmp_path) as journal:
        write(journal, "a")
    line = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(line * 2)
    with pytest.raises(ConfigError, match="line 2 answers 'a' for the second time"):
        open_journal(tmp_path)


def test_two_at_once_are_refused(tmp_path):
    with open_journal(tmp_path), pytest.raises(ConfigError, match="another job is writing"):
        open_journal(tmp_path)
    open_journal(tmp_path).close()


def test_a_write_that_fails_in_the_middle_leaves_no_half_line(tmp_path):
    """The limit on a file's size plays a full disk: the kernel takes what fits and then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_journal(tmp_path) as journal:
        write(journal, "a")
        size = (tmp_path / "out.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write(journal, "c")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "out.jsonl").stat().st_size == size
        assert journal.done == {"a"}
        write(journal, "c")
    assert [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")] == ["a", "c"]


def test_two_jobs_share_no_error_file(tmp_path):
    with open_journal(tmp_path) as journal:
        write(journal, "b")
        with pytest.raises(ConfigError, match=r"err\.jsonl: another job is writing to it"):
            ResultJournal(tmp_path / "other.jsonl", tmp_path / "err.jsonl", IDS, MODEL)


def test_results_of_an_input_that_is_lost_are_kept(tmp_path):
    with open_journal(tmp_path) as journal:
        for name in "abd":
            write(journal, name)
    with open_journal(tmp_path, {}, None) as journal:
        assert journal.done == set("abd")
        assert (journal.totals.completed, journal.totals.failed, journal.totals.expired) == (1, 2, 1)
