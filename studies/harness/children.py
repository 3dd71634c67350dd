"""Child processes of a study: each answers a line of JSON on standard input with one on standard output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, overload

import msgspec

from moeflow.core.errors import GroupError
from moeflow.parallel.child_processes import EXIT_GRACE_S, end_all

Answer = TypeVar("Answer")


class Children:
    """The processes of one measurement. A context manager, at whose end they are gone."""

    def __init__(self) -> None:
        """Begin with no process."""
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        """Start one more. Raises: OSError."""
        pipe = subprocess.PIPE
        self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=pass_fds))

    def tell(self, message: object) -> None:
        """Write a message to each. Raises: GroupError if one has ended."""
        line = msgspec.json.encode(message) + b"\n"
        for number, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(number)

    @overload
    def ask(self, message: object) -> list[Any]: ...
    @overload
    def ask(self, message: object, kind: type[Answer]) -> list[Answer]: ...
    def ask(self, message: object, kind: Any = Any) -> list[Any]:
        """Write a message to each, and return their answers. Raises: GroupError if one has ended."""
        self.tell(message)
        return [self.answer(number, kind) for number in range(len(self.processes))]

    def answer(self, number: int, kind: Any = Any) -> Any:
        """Return the next answer of one. Blocks. Raises: GroupError if it has ended."""
        stdout = self.processes[number].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._fail(number)
        return msgspec.json.decode(line, type=kind)

    def _fail(self, number: int) -> NoReturn:
        process = self.processes[number]
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_GRACE_S)
        raise GroupError(f"process {number} of the study is gone (it ended with {process.returncode}); see its output")

    def close(self) -> None:
        """End all. Blocks: for a moment; a busy one is killed after some seconds."""
        end_all(self.processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
