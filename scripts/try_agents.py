"""Has real agents and client libraries complete a session against the server. Exits with 0 if all of them do.

    scripts/try-agents [client ...] [--template KIND] [--packages FOLDER] [--json] [--keep]

Installs each client from its registry into a temporary folder. Then the client reads a file, edits it and runs a
command, in an empty folder and with an empty home. A script chooses the model's tokens; everything else is the real
server, on a free loopback port. The folder also gets each request of the client, and what the client printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from scripts.agents.clients import CLIENTS, AgentClient, Place  # noqa: E402
from tests.agents.recording import Exchange  # noqa: E402
from tests.agents.scripted_server import scripted_server  # noqa: E402
from tests.agents.session import begin, missing, scripted_answers  # noqa: E402
from tests.agents.templates import TEMPLATES  # noqa: E402

INSTALL_S, SESSION_S = 900, 300
NOTE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Result:
    """One client's session."""

    client: str
    version: str
    protocol: str
    requests: int
    result: str
    note: str


class Failure(Exception):
    """A reason why a client's session is not complete."""


def install(client: AgentClient, packages: Path, home: Path) -> tuple[Path, str]:
    """Install a client's package unless it is there; return the folder of its programs, and its version."""
    folder = packages / client.package.replace("/", "+")
    name = client.package.partition("[")[0]
    if client.installer == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise Failure("npm is not installed: install Node.js 20 or later")
        if not folder.exists():
            download([npm, "install", "--no-fund", "--no-audit", "--prefix", str(folder), name], home)
        description = json.loads((folder / "node_modules" / name / "package.json").read_text())
        return folder / "node_modules" / ".bin", description["version"]
    programs = folder / "bin"
    if not folder.exists():
        venv.create(folder, with_pip=True)
        download([str(programs / "pip"), "install", "-q", client.package], home)
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return programs, run(
        [str(programs / "python"), "-c", code], home, home, session_environment(home, {}), SESSION_S
    ).strip()


def download(command: Sequence[str], home: Path) -> None:
    """Run a package manager with the settings of its user. Raises: Failure."""
    run(command, home, home, os.environ, INSTALL_S)


def session_environment(home: Path, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a client: a home of its own, and no proxy to loopback."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    loopback = "127.0.0.1,localhost"
    return {**kept, "HOME": str(home), "NO_PROXY": loopback, "no_proxy": loopback, **own}


def run(command: Sequence[str], folder: Path, home: Path, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a command, and keep its output in `home`; return its standard output. Raises: Failure."""
    name = Path(command[0]).name
    printed, complaints = home / f"{name}.out", home / f"{name}.err"  # no pipes, which helpers would keep open
    with printed.open("w") as stdout, complaints.open("w") as stderr:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"{name} took more than {timeout_s:.0f} s") from None
    if done.returncode:
        lines = (complaints.read_text().strip() or printed.read_text().strip()).splitlines() or [""]
        raise Failure(f"{name} exited with {done.returncode}: {lines[-1]}")
    return printed.read_text()


def end_helpers(home: Path) -> None:
    """Kill the processes of a session that outlive it. They have its home."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


def try_client(client: AgentClient, folder: Path, packages: Path, template: str) -> Result:
    """Install a client, and run its session."""
    own = folder / client.name
    home, work = own / "home", own / "work"
    home.mkdir(parents=True)
    begin(work)
    kind, exchanges, version, note = TEMPLATES[template], list[Exchange](), "", ""
    answer = scripted_answers(kind, client.calls(str(work / "notes.txt")), client.final)
    try:
        programs, version = install(client, packages, home)
        with scripted_server(kind, answer, client.model) as (url, exchanges):
            place = Place(programs, home, work, url, client.model)
            environment = session_environment(home, client.environment(place))
            for command in client.commands(place):
                run(command, work, home, environment, SESSION_S)
        note = missing(work)
    except Failure as failure:
        note = str(failure)
    finally:
        end_helpers(home)
    keep_requests(exchanges, own / "requests")
    refused = next((one for one in exchanges if one.status >= 400), None)
    if refused is not None:
        note = f"{note}; " * bool(note) + f"{refused.method} {refused.path}: {refused.status} {refused.answer.decode()}"
    is_failed = bool(note)
    return Result(
        client.name, version, client.protocol, len(exchanges), "failed" if is_failed else "ok", note[:NOTE_CHARACTERS]
    )


def keep_requests(exchanges: Sequence[Exchange], folder: Path) -> None:
    """Write each request of a session into a file."""
    folder.mkdir()
    for number, exchange in enumerate(exchanges):
        (folder / f"{number:02}.json").write_text(json.dumps(exchange.as_json(), indent=1, ensure_ascii=False))


def table(results: Sequence[Result]) -> str:
    """Return results as lines of equal columns."""
    rows = [list(Result.__dataclass_fields__), *([str(value) for value in asdict(one).values()] for one in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(f"{c:{w}}" for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)


def main() -> int:
    """Run the sessions one after the other."""
    known = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", nargs="*", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--template", choices=TEMPLATES, default="chatml", help="of the model; default chatml")
    parser.add_argument(
        "--packages", type=Path, help="use packages of this folder, and install others into it; default: all anew"
    )
    parser.add_argument("--json", action="store_true", help="print one object a client instead of a table")
    parser.add_argument("--keep", action="store_true", help="keep the folder, and print its path")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.client if name not in known]:
        parser.error(f"there is no client {unknown[0]!r}: choose from {', '.join(known)}")
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="moeflow-agents-"))
        if arguments.keep:
            print(f"everything is kept in {folder}", file=sys.stderr)
        else:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        packages, results = (arguments.packages or folder / "packages").resolve(), []
        for name in arguments.client or known:
            print(f"{name} ...", file=sys.stderr)
            results.append(try_client(known[name], folder, packages, arguments.template))
    print("\n".join(json.dumps(asdict(one)) for one in results) if arguments.json else table(results))
    return 0 if all(one.result == "ok" for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
