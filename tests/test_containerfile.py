"""deploy/Containerfile: the copied files exist and suffice to build, its commands exist, and it does not run as
root."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import click
import pytest

from moeflow.cli.main import main
from moeflow.cli.serve import serve
from moeflow.server.api import status
from moeflow.server.config import ServerConfig
from scripts.wheel_files import ROOT, differences, names_in
from tests.test_wheel import BUILD

TEXT = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, continued lines joined, comments left out."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    found = [line.split(maxsplit=1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in found]


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, `FROM` first."""
    found: list[list[tuple[str, str]]] = []
    for name, arguments in instructions():
        if name == "FROM":
            found.append([])
        found[-1].append((name, arguments))
    return found


def last(name: str) -> str:
    """Return the arguments of an instruction in the stage that is kept."""
    return [arguments for it, arguments in stages()[-1] if it == name][-1]


def healthcheck() -> list[str]:
    command: list[str] = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    return command


def test_every_instruction_is_one():
    known = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY"}
    known |= {"VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert [name for name, _ in instructions() if name not in known] == []
    assert [stage[0][0] for stage in stages()] == ["FROM", "FROM"]


def test_both_stages_have_the_same_python_and_moeflow_runs_on_it():
    build, kept = (re.match(r"python:(\d+)\.(\d+)(-slim)?-bookworm", stage[0][1]) for stage in stages())
    assert build.groups()[:2] == kept.groups()[:2]
    assert (build[3], kept[3]) == (None, "-slim")  # the compiler stays behind
    requires = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(int, kept.groups()[:2])) >= tuple(map(int, requires.groups()))


@pytest.mark.slow
def test_what_is_copied_is_enough_for_the_package(tmp_path):
    for name, arguments in stages()[0]:
        if name == "COPY":
            *sources, target = shlex.split(arguments)
            for source in sources:
                at = tmp_path / (source if target == "./" else target)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, at)
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tmp_path, check=True, capture_output=True)
    assert differences(names_in(next(out.glob("*.whl"))), has_kernels=False) == []


def test_packages_are_pinned_as_the_set_up_pins_them():
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    pins = re.findall(r"\b([a-z][\w-]*==[\w.]+)", TEXT)
    assert len(pins) == 2
    assert [pin for pin in pins if pin not in setup] == []
    assert TEXT.index("torch==") < TEXT.index("install -c constraints.txt .")


def test_it_runs_as_a_user_who_owns_what_is_written():
    user = last("USER")
    assert re.search(rf"--uid {user}\b", last("RUN"))
    assert int(user) >= 10000
    volumes = json.loads(last("VOLUME"))
    assert all(path in last("RUN").partition("install -d -o moeflow")[2] for path in volumes)
    settings = dict(word.split("=", 1) for word in last("ENV").split())
    assert {settings["HF_HOME"], settings["MOEFLOW_CACHE"], last("WORKDIR")} == set(volumes)


def test_it_serves_and_listens_on_loopback_unless_told_otherwise():
    (program,), (verb, *options) = json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))
    assert program == "moeflow"
    assert main.get_command(click.Context(main), verb) is serve
    context = serve.make_context(verb, options, parent=click.Context(main))
    assert ServerConfig(host=context.params["host"]).is_loopback
    assert context.params["port"] == int(last("EXPOSE"))
    assert f":{last('EXPOSE')}/" in healthcheck()[-1]


@pytest.fixture
def answering() -> Iterator[tuple[HTTPServer, list[str]]]:
    """A server that answers with the status set last, and the requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, asked
        server.shutdown()
        thread.join()


def test_the_check_of_its_health_tells_ready_from_loading_and_from_gone(answering):
    server, asked = answering
    program, *arguments = healthcheck()
    assert program == "python"

    def is_healthy(port: int) -> bool:
        command = [argument.replace(":8000/", f":{port}/") for argument in arguments]
        return subprocess.run([sys.executable, *command], capture_output=True, check=False).returncode == 0

    found = []
    for server.status in (200, 503):
        found.append(is_healthy(server.server_port))
    assert found == [True, False]
    assert asked == ["/ready", "/ready"]
    assert asked[0] in [route.path for route in status.router.routes]
    assert not is_healthy(1)  # where nothing listens
