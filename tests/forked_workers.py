"""`--workers N`: N processes run the tests, forked when all are collected, so that modules are imported once.

A file's tests stay in one worker and in their order, since what they share is made in each worker that wants it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="how many processes run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Have workers run the files, in their order, and report what they say of each test."""
    config = session.config
    num_workers = config.getoption("--workers")
    if num_workers == 1 or config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    numbers, end = os.pipe()  # each worker takes the next file's from it until there are none
    os.write(end, b"".join(number.to_bytes(2, "big") for number in range(len(files))))
    os.close(end)
    temporary = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers = [_Worker(session, _taken(numbers, files), temporary / f"worker{n}") for n in range(num_workers)]
    try:
        _report(session, {worker.messages: worker for worker in workers})
    finally:
        for worker in workers:
            worker.end()
    return True


def _taken(numbers: int, files: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    while number := os.read(numbers, 2):
        yield from files[int.from_bytes(number, "big")]


def _report(session: pytest.Session, workers: dict[Any, _Worker]) -> None:
    """Report what workers say until all have ended. What one was at when it died has failed."""
    while workers:
        for messages in wait([*workers]):
            report = workers[messages].next_report(session.config)
            if report is None:
                del workers[messages]
                continue
            session.config.hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


class _Worker:
    """A process that runs tests, as its parent sees it."""

    def __init__(self, session: pytest.Session, items: Iterable[pytest.Item], temporary: Path) -> None:
        self.messages, messages = Pipe(duplex=False)
        self._at: str | None = None  # the test that it runs, None when it has run all
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _run(session, items, messages, temporary)
            except (KeyboardInterrupt, BrokenPipeError):  # it is to end
                pass
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        messages.close()

    def next_report(self, config: pytest.Config) -> pytest.TestReport | None:
        """Return what it says next of a test, None when it has ended."""
        try:
            while not isinstance(message := self.messages.recv(), dict):
                self._at = message
        except EOFError:
            died_at, self._at = self._at, None
            return _report_of_death(died_at) if died_at else None
        return config.hook.pytest_report_from_serializable(config=config, data=message)

    def end(self) -> None:
        """Wait until it has ended: if nobody listens any more, after the test that it is at."""
        self.messages.close()
        os.waitpid(self._pid, 0)


def _report_of_death(nodeid: str) -> pytest.TestReport:
    where = (nodeid.partition("::")[0], None, nodeid)
    return pytest.TestReport(nodeid, where, {}, "failed", "its process died; the rest of its file was not run", "call")


def _run(session: pytest.Session, items: Iterable[pytest.Item], messages: Connection, temporary: Path) -> None:
    """Run tests in this process, with output and temporary files of its own, and nothing on the terminal."""
    config = session.config
    config._tmp_path_factory._basetemp = temporary  # type: ignore[attr-defined]
    temporary.mkdir()
    config.get_terminal_writer()._file = StringIO()
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.register(_Messages(config, messages))
    try:
        for item, following in pairwise(chain(items, [None])):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        session._setupstate.teardown_exact(None)  # what is left if it was interrupted
    messages.send(None)


class _Messages:
    """Tells the parent which test begins and what became of it."""

    def __init__(self, config: pytest.Config, messages: Connection) -> None:
        self._config = config
        self._messages = messages

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._messages.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._messages.send(data)
