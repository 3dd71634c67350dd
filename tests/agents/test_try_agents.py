"""The script that tries clients: a complete session, and each way to fail, with a client that needs no registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from scripts.agents.clients import CLIENTS, AgentClient
from scripts.try_agents import table, try_client
from tests.agents.session import COMMAND, TASK, Call
from tests.server.live_server import eventually

PROGRAM = """
import json, subprocess, sys, urllib.request
url, task = sys.argv[1:]
messages = [{"role": "user", "content": task}]
tools = [{"type": "function", "function": {"name": "shell"}}]
while True:
    body = json.dumps({"model": "scripted", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    if not message.get("tool_calls"):
        break
    messages.append({key: message[key] for key in ("role", "content", "tool_calls")})
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
"""
EDIT = Call("shell", {"command": "sed -i s/red/green/ notes.txt"})
RUN = Call("shell", {"command": COMMAND})


def client(*calls: Call, program: str = PROGRAM) -> AgentClient:
    return AgentClient(
        "plain",
        "httpx",
        "pip",
        "chat",
        lambda place: [[str(place.programs / "python"), "-c", program, place.url, TASK]],
        lambda _: calls,
    )


def tried(folder: Path, one: AgentClient):
    programs = folder / "packages" / one.package / "bin"
    programs.mkdir(parents=True)
    program = programs / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return try_client(one, folder, folder / "packages", "chatml")


def test_a_session(tmp_path):
    result = tried(tmp_path, client(EDIT, RUN))
    assert (result.result, result.note, result.requests) == ("ok", "", 3)
    assert result.version[0].isdigit()
    kept = json.loads((tmp_path / "plain" / "requests" / "02.json").read_text())
    assert (kept["status"], kept["path"], len(kept["body"]["messages"])) == (200, "/v1/chat/completions", 5)
    assert "the green fox" in kept["body"]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("one", "note"),
    [
        (client(RUN), "notes.txt was not edited"),
        (client(EDIT), "the command did not run"),
        (client(program="raise SystemExit('no network')"), "exited with 1: no network"),
        (client(program=PROGRAM.replace('"messages": messages', '"massages": []')), "400"),
    ],
)
def test_failures(one, note, tmp_path):
    result = tried(tmp_path, one)
    assert result.result == "failed"
    assert note in result.note
    assert "failed" in table([result])


def test_helpers_of_a_session_end_with_it(tmp_path):
    """One that has left the session's process group, and keeps its output open."""
    begins_helper = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    result = tried(tmp_path, client(program=begins_helper))
    assert result.note == "notes.txt was not edited"
    helper = int((tmp_path / "plain" / "home" / "python.out").read_text())
    assert eventually(lambda: has_ended(helper))


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_client_has_a_name_of_its_own():
    assert len({one.name for one in CLIENTS}) == len(CLIENTS)
