"""Python commands, each in a process of its own, forked from one with slow imports already done.

For tests of what commands find on their path, and not of how a process starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Reads a command a line, and writes the code with which its process ended.
_PARENT = """
import gc, importlib, json, os, runpy, sys
folder, *imported = sys.argv[1:]
for name in imported:
    importlib.import_module(name)
gc.freeze()  # or each process would, at its end, look through all of torch for garbage
for line in sys.stdin:
    how, what, *arguments = json.loads(line)
    if (child := os.fork()) == 0:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()
for number, name, mode in ((0, os.devnull, "r"), (1, f"{folder}/stdout", "w"), (2, f"{folder}/stderr", "w")):
    with open(name, mode) as file:
        os.dup2(file.fileno(), number)
sys.argv = [what, *arguments]
if how == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
"""


@contextlib.contextmanager
def forked_commands(folder: Path, imported: Sequence[str], **environment: str) -> Iterator[Callable[..., str]]:
    """Yield a function that runs Python with arguments, `-m module ...` or `-c code`, and returns the output.

    The folder is for files with the output of commands. `imported` names the modules that all of them find imported.
    A command that fails raises an AssertionError with its output.
    """
    command = [sys.executable, "-c", _PARENT, str(folder), *imported]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as parent:  # type: ignore[call-overload]

        def run(*arguments: str) -> str:
            parent.stdin.write(json.dumps(arguments) + "\n")
            parent.stdin.flush()
            code = parent.stdout.readline()
            assert code == "0\n", (folder / "stderr").read_text()
            return (folder / "stdout").read_text()

        try:
            yield run
        finally:
            parent.stdin.close()


@functools.cache
def lasting_commands(*imported: str) -> Callable[..., str]:
    """Return what `forked_commands` yields, the same to all callers in this process, until it ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return stack.enter_context(forked_commands(folder, imported))
