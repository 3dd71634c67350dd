"""Draws small mistakes in a folder of the package and lists those that its tests do not notice.

A mistake exists only in the memory of the process that runs the tests: an import hook hands it the changed module, and
no file is written. So nothing ever has to be restored. But processes that a test starts run the true code.
torch and its like are imported once, if the tests need them, and each run of the tests is a fork of that.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from mutants import places

ROOT = Path(__file__).resolve().parent.parent
MEMORY_BYTES = 8 << 30  # of a run: a mistake may ask for any amount
IMPORTED = "heavy modules:"
PASSED, NO_TESTS, TIMED_OUT = 0, 5, -1
HEAVY = ("numpy", "scipy.optimize", "torch", "transformers")  # modules that take long to import
ENDINGS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one mistake."""

    file: Path
    line: int
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The mistake as a patch."""
        name = str(self.file.relative_to(ROOT))
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), name, name, n=2, lineterm="")
        return "\n".join(lines)


class MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the package in its mutated form."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = ".".join(mutant.file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return where to find a module, if it is the one."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.file, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the changed file."""
        exec(compile(self._mutant.after, str(self._mutant.file), "exec"), module.__dict__)


def draw(target: Path, number: int, seed: int) -> list[Mutant]:
    """Return so many mutants, each at a place of its own; all places are equally likely."""
    files = sorted(target.rglob("*.py")) if target.is_dir() else [target]
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    random_numbers = random.Random(seed)
    found = [(file, edits) for file, source in sources.items() for edits in places(source)]
    random_numbers.shuffle(found)
    drawn = []
    for file, edits in itertools.islice(found, number):
        edit = random_numbers.choice(edits)
        drawn.append(Mutant(file, edit.node.lineno, sources[file], edit.apply(sources[file])))
    return drawn


def run_tests(mutant: Mutant | None, options: Sequence[str], limit_s: float) -> tuple[str, list[str]]:
    """Run pytest in a fork of this process; return the first test that fails, empty if all pass, and heavy imports."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        status = _exit_status(mutant, options, limit_s, file.fileno())
        file.seek(0)
        output = file.read()
    if status in (PASSED, NO_TESTS):
        return "", output.rpartition(IMPORTED)[2].split()
    failed = re.search(r"^(FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[2] if failed else "no end" if status == TIMED_OUT else f"exit status {status}", []


def _exit_status(mutant: Mutant | None, options: Sequence[str], limit_s: float, output: int) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # in the midst of a fork they would be lost
    child = os.fork()
    if not child:
        _be_the_tests(mutant, options, output)
    os.setpgid(child, child)  # here too: the child may not have come to it
    ends_at = time.monotonic() + limit_s
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        while time.monotonic() < ends_at:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return TIMED_OUT
    finally:
        try:
            os.killpg(child, signal.SIGKILL)  # with whatever a test has started
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _be_the_tests(mutant: Mutant | None, options: Sequence[str], output: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    for stream, to in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(to, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    if mutant is not None:
        sys.meta_path.insert(0, MutantImporter(mutant))
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is enough, however large
    hypothesis.settings.register_profile(
        "mutants",
        database=None,
        deadline=None,
        derandomize=True,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    always = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    always += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of modules that are imported already
    status = 1
    try:
        status = int(pytest.main([*always, *options]))
        print(IMPORTED, *(name for name in HEAVY if name in sys.modules))
    finally:
        sys.stdout.flush()
        os._exit(status)


def noticed_by(mutant: Mutant, paths: Sequence[str], kinds: Sequence[str], limit_s: float) -> str:
    """Return a test that fails or takes for ever, empty if none does; those named after the file run first."""
    nearest = [str(file) for path in paths for file in sorted((ROOT / path).rglob(f"test_{mutant.file.stem}*.py"))]
    failures = (run_tests(mutant, ["-m", kind, *nearest, *paths], limit_s)[0] for kind in kinds)
    return next(filter(None, failures), "")


def main() -> None:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("target", type=Path, help="folder or file of the package, as moeflow/planner")
    parser.add_argument("tests", nargs="*", help="what pytest runs [the folder of tests/ of the same name]")
    parser.add_argument("-n", "--number", type=int, default=40, help="how many mistakes [40]")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing [0]")
    parser.add_argument("--slow", action="store_true", help="try tests that are marked slow, too, where others pass")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    asked = parser.parse_args()
    target = asked.target.resolve()
    folder = target if target.is_dir() else target.parent
    paths = asked.tests or [str(Path("tests", *folder.relative_to(ROOT / "moeflow").parts))]
    mutants = draw(target, asked.number, asked.seed)
    os.nice(10)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the tests, too
    kinds = ["not slow", "slow"] if asked.slow else ["not slow"]
    begun = time.monotonic()
    for kind in kinds:
        failed, imported = run_tests(None, ["-m", kind, *paths], 3600)
        if failed:
            sys.exit(f"{failed} fails without any mistake: make scripts/test {' '.join(paths)} pass first")
        for name in imported:
            importlib.import_module(name)
    limit_s = 30 + 3 * (time.monotonic() - begun)
    survivors, tried = [], 0
    try:
        for mutant in mutants:
            test = noticed_by(mutant, paths, kinds, limit_s)
            tried += 1
            print(f"{mutant.file.relative_to(ROOT)}:{mutant.line}: {test or 'NOT NOTICED'}", flush=True)
            if not test:
                survivors.append(mutant)
    except KeyboardInterrupt:
        print("interrupted")
    report(asked, paths, survivors, tried)


def report(asked: argparse.Namespace, paths: Sequence[str], survivors: Sequence[Mutant], tried: int) -> None:
    """Print the survivors and the score."""
    for mutant in survivors:
        print(f"\n{mutant.diff}")
    print(f"\n{asked.target}: {tried - len(survivors)} of {tried} noticed (seed {asked.seed}) by {' '.join(paths)}")
    if asked.json:
        found = {
            "target": str(asked.target),
            "tests": list(paths),
            "seed": asked.seed,
            "tried": tried,
            "noticed": tried - len(survivors),
            "survivors": [
                {"file": str(it.file.relative_to(ROOT)), "line": it.line, "diff": it.diff} for it in survivors
            ],
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
