"""An engine in a process of its own, asked over pipes, and stopped while another is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moeflow.core.errors import EngineError
from studies.harness.needs import ROOT
from studies.peers.contestants import Contestant

ANSWER_S = 300.0  # longer than any load or measurement may take
EXIT_S = 10.0


class EngineProcess:
    """Loads at once. Outside `ask` the process stands still, so that its threads' spinning disturbs no other process.

    `first` has the measurements of its start: load_s, first_token_s, start_s, resident_mib, foreign_cpu.

    Raises: EngineError if the engine dies or is silent for minutes; the end of its log is in the message.
    """

    def __init__(
        self, contestant: Contestant, *, threads: int, seed: int, log: Path, prefix: Sequence[str | Path] = ()
    ) -> None:
        """`prefix` is a program that starts what follows it."""
        self.contestant = contestant
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        wish = {**contestant.wish, "threads": threads, "seed": seed, "started": time.monotonic()}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*prefix, contestant.python, "-m", f"studies.peers.workers.{contestant.worker}", json.dumps(wish)],
                cwd=ROOT,
                env={
                    **os.environ,
                    **contestant.variables,
                    "OMP_NUM_THREADS": str(threads),
                    "HF_HUB_OFFLINE": "1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.first = self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Let the process run until it has answered."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        reply = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self._death()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> EngineError:
        code = self._process.wait()
        tail = " / ".join(self._log.read_text(errors="replace").splitlines()[-3:])
        return EngineError(f"{self.contestant.name} ended with {code}: {tail} (all of it: {self._log})")
