"""Who may join, and what both sides say if not. Nothing is computed: the ranks are threads of the test."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.chaos.deployment import free_port
from moeflow.core.errors import CheckpointError, ConfigError, GroupError
from moeflow.core.units import GIB
from moeflow.engine.ranks import join as join_module
from moeflow.engine.ranks import joining
from moeflow.engine.ranks.join import JoinSettings, join
from moeflow.engine.ranks.joined_ranks import JoinedRanks
from moeflow.engine.ranks.joining import JOINING, Invitation, JoinRequest, hear, own_application, say
from moeflow.engine.ranks.reception import Reception
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.parallel.tcp.conversation import RefusedError
from moeflow.parallel.tcp.endpoint import connect
from moeflow.parallel.tcp.link import Link
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.parallel.links import two_ends
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


class Head:
    """A first rank that waits for others in a thread, and its result."""

    def __init__(self, model: Path, cache_dir: Path, num_ranks: int = 2, timeout_s: float = PATIENCE_S) -> None:
        settings = Settings(model=str(model), kv_cache_bytes=2**20, num_threads=1, cache_dir=cache_dir)
        self.port = free_port()
        config = resolve(dataclasses.replace(settings, num_ranks=num_ranks, listen_ranks=str(self.port))).config
        self.config = config
        parallel = dataclasses.replace(
            config.parallel, join=dataclasses.replace(config.parallel.join, timeout_s=timeout_s), timeout_s=PATIENCE_S
        )
        self.token = ensure_token(default_token_file(cache_dir))
        self.outcome: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(config, parallel))
        self._thread.start()

    def _run(self, config, parallel) -> None:
        try:
            with closing(open_checkpoint(config.model_path)) as checkpoint:
                self.outcome.put(JoinedRanks(checkpoint, config, parallel))
        except (GroupError, ConfigError) as error:
            self.outcome.put(error)

    def settings(self, **changes) -> JoinSettings:
        return JoinSettings(
            **({"host": "127.0.0.1", "port": self.port, "token": self.token, "num_threads": 1} | changes)
        )

    def connect(self) -> Link:
        """Return a link to it, once it listens."""
        while True:
            with contextlib.suppress(GroupError):
                return connect("127.0.0.1", self.port, self.token)

    def result(self):
        found = self.outcome.get(timeout=PATIENCE_S)
        self._thread.join()
        return found


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    """One that waits while others are refused, and gets its rank at the end."""
    head = Head(model, tmp_path_factory.mktemp("cache"))
    head.connect().close()  # it listens
    yield head
    with closing(applied(head)):
        head.result().close()


def head_said(caplog, what: str, times: int = 1) -> str:
    """Return the lines with this, once there are so many: the other thread may be about to say it."""
    for _ in range(1000):
        lines = [record.getMessage() for record in caplog.records if what in record.getMessage()]
        if len(lines) >= times:
            return "\n".join(lines)
        time.sleep(0.01)
    raise AssertionError(caplog.text)


def test_a_wrong_token_is_refused(head, caplog):
    with pytest.raises(ConfigError, match=f"127.0.0.1:{head.port}: the token is refused: copy the head's token file"):
        join(head.settings(token=b"another token that is long"), pytest.fail)
    assert "does not have the cluster's token" in head_said(caplog, "is refused")


def test_another_checkpoint_is_refused(head, model, tmp_path, caplog):
    write_tiny_mixtral(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="refuses this process: its checkpoint is not that of the first rank"):
        join(head.settings(model=str(tmp_path / "other")), lambda news: None)
    assert "its checkpoint is not that of the first rank" in head_said(caplog, "does not join")


def test_a_checkpoint_that_is_not_there_is_told_both(head, tmp_path, caplog):
    with pytest.raises(CheckpointError, match="none: does not exist"):
        join(head.settings(model=str(tmp_path / "none")), pytest.fail)
    assert "none: does not exist" in head_said(caplog, "does not join")


def test_a_rank_gets_the_model_first_and_joins_again(head, model, tmp_path, monkeypatch, caplog):
    write_tiny_mixtral(tmp_path / "other", seed=1)
    brought: list[str] = []

    def bring(server_path: str, cache_dir, on_step) -> str:
        brought.append(server_path)
        return str(tmp_path / "other")

    monkeypatch.setattr(join_module, "find_own_model", lambda *_: str(tmp_path / "other") if brought else None)
    monkeypatch.setattr(join_module, "bring_own_model", bring)
    with pytest.raises(ConfigError, match="its checkpoint is not that of the first rank"):
        join(head.settings(), lambda news: None)
    assert brought == [str(model)]
    assert "it gets the model first" in head_said(caplog, "it gets the model first")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"software": "moeflow 0.0.1 with torch 2"},
            "it is moeflow 0.0.1 with torch 2, the first rank moeflow",
        ),
        ({"processor": "aarch64"}, "its processor is aarch64"),
        ({"cpu_isa": "sve"}, "its processor is"),
        ({"cpu_isa": "generic"}, "its instruction set is generic, .* MOEFLOW_CPU_ISA=generic"),
        ({"available_bytes": 1 << 20}, r"it has 1.0 MiB of memory free and needs 51\d.* use more ranks"),
    ],
)
def test_who_would_compute_other_bits_or_lacks_memory_is_refused(head, changes, complaint, caplog):
    if extension.best_isa("") == "generic" and changes.get("cpu_isa") == "generic":
        pytest.skip("the processor has nothing better")
    application = msgspec.structs.replace(own_application(1, "", 64 * GIB), **changes)
    with closing(head.connect()) as link:
        say(link, application)
        with pytest.raises(RefusedError, match=complaint) as caught:
            hear(link, Invitation)
        assert not caught.value.may_retry
    assert str(caught.value) in head_said(caplog, "does not join")


def test_who_talks_nonsense_is_no_more_than_a_line_in_the_log(head, caplog):
    port = joining.Candidacy("fingerprint", port=70_000)
    for message in (b"\xc1", *map(msgspec.msgpack.encode, ({"type": "application"}, port, Invitation("x")))):
        with closing(head.connect()) as link:
            link.send_message(JOINING, message)
            with pytest.raises(GroupError, match=r"closed the connection|is gone"):
                hear(link, Invitation)
    assert "says Invitation where JoinRequest is expected" in head_said(caplog, "where JoinRequest")
    assert "sends a message that this version does not understand" in caplog.text


def test_too_few_within_the_time_is_an_error_that_says_what_to_do(model, tmp_path):
    head = Head(model, tmp_path, num_ranks=3, timeout_s=0.3)
    error = head.result()
    assert isinstance(error, GroupError)
    assert str(error) == (
        "0 of 2 other ranks joined within 0.3 s: run `moeflow join` on each of their machines, or use fewer (--ranks)"
    )


def joining_until(settings, text: str) -> list[str]:
    """Join until it prints this; return its output."""

    class Enough(Exception):
        pass

    news: list[str] = []

    def note(line: str) -> None:
        news.append(line)
        if text in line:
            raise Enough

    with pytest.raises(Enough):
        join(settings, note)
    return news


def applied(head):
    """Apply as one that has the checkpoint does; return the link."""
    link = head.connect()
    say(link, own_application(1, "", 64 * GIB))
    hear(link, Invitation)
    with closing(open_checkpoint(head.config.model_path)) as checkpoint:
        say(link, joining.Candidacy(content_fingerprint(checkpoint), 1))
    return link


def test_one_too_many_is_told_and_waits_and_one_that_leaves_makes_room(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(join_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(join_module, "_MAX_PAUSE_S", 0.01)
    head = Head(model, tmp_path, num_ranks=3)
    links = []
    for number in (1, 2, 3):
        links.append(applied(head))
        head_said(caplog, "joins:", number)
        if number == 1:
            links[0].close()  # gone before there were enough
    assert [hear(link, joining.Assignment, PATIENCE_S).rank for link in links[1:]] == [1, 2]
    full = "all 2 other ranks have joined (--ranks); it may take the place of one later"
    late = applied_in_vain(head), applied_in_vain(head)
    assert [(str(error), error.may_retry) for error in late] == [(full, True)] * 2
    assert joining_until(head.settings(), "later") == [f"{full}; waiting to join again"]
    head.result().close()
    for link in links:
        link.close()
    assert "has gone again" in caplog.text
    assert caplog.text.count("does not join: all 2") == 1


def test_who_comes_while_the_engine_ends_is_told(model):
    """Else it would wait for ever, unnoticed."""
    reception = Reception(1, Invitation("model"), "fingerprint", lambda application: "")
    reception.close()
    with two_ends() as (ours, theirs):
        say(theirs, own_application(1, "", 64 * GIB))
        reception.take_in(ours)
        with pytest.raises(RefusedError, match="the engine has ended") as caught:
            hear(theirs, Invitation)
        assert caught.value.may_retry


def applied_in_vain(head) -> RefusedError:
    with closing(head.connect()) as link:
        say(link, own_application(1, "", 64 * GIB))
        with pytest.raises(RefusedError) as caught:
            hear(link, Invitation)
    return caught.value


def test_copies_of_a_checkpoint_may_join_from_anywhere(model, tmp_path):
    head = Head(model, tmp_path)
    head.connect().close()  # it listens
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert joining_until(head.settings(model=str(copy)), "loading") == [
        f"waiting at 127.0.0.1:{head.port} until all ranks are there",
        f"rank 1 of 2: loading {copy}",
    ]
    head.result().close()


def test_the_extension_is_needed(monkeypatch):
    monkeypatch.setattr(extension, "_WHY_NOT", "nobody compiled it")
    with pytest.raises(ConfigError, match="a rank needs the CPU extension: nobody compiled it"):
        join(JoinSettings(host="127.0.0.1", port=1, token=b""), pytest.fail)


def test_a_head_that_is_not_there_is_waited_for_and_said_once(monkeypatch):
    pauses: list[float] = []

    class Enough(Exception):
        pass

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 7:
            raise Enough

    monkeypatch.setattr(join_module, "time", SimpleNamespace(sleep=sleep))
    news: list[str] = []
    port = free_port()
    with pytest.raises(Enough):
        join(JoinSettings(host="127.0.0.1", port=port, token=b"x" * 16), news.append)
    assert news == [f"cannot connect to 127.0.0.1:{port}: Connection refused; waiting to join again"]
    assert pauses == [0.5, 1, 2, 4, 8, 8, 8]


def test_an_application_says_what_this_machine_is():
    found = own_application(3, "generic", 5)
    assert isinstance(found, JoinRequest)
    assert (found.cpu_isa, found.num_threads, found.available_bytes) == ("generic", 3, 5)
    assert found.software.startswith("moeflow ")
    assert " with torch " in found.software
