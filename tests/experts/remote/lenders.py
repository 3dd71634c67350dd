"""Lenders in a test's process, each behind a wire that can be cut."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from moeflow.cli.chaos.proxy import Proxy
from moeflow.experts.remote.lender import Lender
from moeflow.parallel.tcp.endpoint import Endpoint

PATIENCE_S = 30.0
TOKEN = b"a token of tests, long enough"


class RunningLender:
    """A lender, and its messages."""

    def __init__(self, memory_bytes: int, token: bytes = TOKEN, cpu_isa: str = "") -> None:
        self.news: list[str] = []
        self.lender = Lender(memory_bytes, num_threads=1, cpu_isa=cpu_isa, on_news=self.news.append)
        self.endpoint = Endpoint(token)
        self.proxy = Proxy(self.endpoint.listen("127.0.0.1", 0, self.lender.take_in))
        self.address = ("127.0.0.1", self.proxy.port)

    @property
    def num_held(self) -> int:
        return sum(head.loan.num_held for head in self.lender._heads.values())

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.news))

    def close(self) -> None:
        self.lender.close()
        self.endpoint.close()
        self.proxy.close()


@contextlib.contextmanager
def running_lender(memory_bytes: int = 1 << 28, **more) -> Iterator[RunningLender]:
    lender = RunningLender(memory_bytes, **more)
    try:
        yield lender
    finally:
        lender.close()


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        threading.Event().wait(0.002)
