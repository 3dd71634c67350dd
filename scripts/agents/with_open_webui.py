"""A session through Open WebUI: with_open_webui.py URL PROTOCOL TASK.

Starts its server on loopback with an empty data folder, adds the tools of `file_tools.py`, and asks as its page does:
Open WebUI itself calls the tools, and asks for a title, tags and follow-ups in the background.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

START_S, ANSWER_S, BACKGROUND_S = 150, 60, 3
TOOLS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import file_tools

class Tools:
    def read_file(self, path: str) -> str:
        '''
        Return the text of a file.
        :param path: The file.
        '''
        return file_tools.read_file(path)

    def replace_text(self, path: str, old: str, new: str) -> str:
        '''
        Replace a text in a file.
        :param path: The file.
        :param old: The text to replace.
        :param new: The text that comes in its place.
        '''
        return file_tools.replace_text(path, old, new)

    def run_command(self, command: str) -> str:
        '''
        Run a shell command and return its output.
        :param command: The command.
        '''
        return file_tools.run_command(command)
"""


def settings(url: str) -> dict[str, str]:
    """Return the environment of a server without accounts that connects to one address alone."""
    off = ("WEBUI_AUTH", "ENABLE_OLLAMA_API", "ENABLE_VERSION_UPDATE_CHECK", "ANONYMIZED_TELEMETRY")
    on = ("OFFLINE_MODE", "DO_NOT_TRACK", "SCARF_NO_ANALYTICS")
    return {
        **dict.fromkeys(off, "False"),
        **dict.fromkeys(on, "True"),
        "HF_HUB_OFFLINE": "1",
        "DATA_DIR": str(Path.home() / "data"),
        "OPENAI_API_BASE_URLS": f"{url}/v1",
        "OPENAI_API_KEYS": "none",
        "RAG_EMBEDDING_ENGINE": "openai",  # or it downloads a model
        "WEBUI_SECRET_KEY": "local",
    }


def until(what: str, timeout_s: float, look: Callable[[], Any]) -> Any:
    """Return the first true result of `look`. The server may not listen yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise SystemExit(f"Open WebUI: {what} took more than {timeout_s} s")


def post(http: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
    """Return the answer to a request."""
    answer = http.post(path, json=body)
    if answer.is_error:
        raise SystemExit(f"Open WebUI: {path}: {answer.status_code} {answer.text}")
    return answer.json()


def talk(http: httpx.Client, task: str) -> str:
    """Return the text of the answer in a new chat."""
    until("the start", START_S, lambda: http.get("/health").is_success)
    token = post(http, "/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    http.headers["authorization"] = f"Bearer {token}"
    (model,) = (one["id"] for one in http.get("/api/models").json()["data"])
    post(http, "/api/v1/tools/create", {"id": "files", "name": "Files", "content": TOOLS, "meta": {}})
    asked, answered = str(uuid.uuid4()), str(uuid.uuid4())
    messages = {
        asked: {"id": asked, "parentId": None, "childrenIds": [answered], "role": "user", "content": task},
        answered: {"id": answered, "parentId": asked, "childrenIds": [], "role": "assistant", "content": ""},
    }
    history = {"messages": messages, "currentId": answered}
    chat = {"title": "New Chat", "models": [model], "history": history, "messages": list(messages.values())}
    chat_id = post(http, "/api/v1/chats/new", {"chat": chat})["id"]
    wanted = dict.fromkeys(("title_generation", "tags_generation", "follow_up_generation"), True)
    request = {"model": model, "messages": [{"role": "user", "content": task}], "stream": True, "tool_ids": ["files"]}
    request |= {"chat_id": chat_id, "id": answered, "session_id": "local", "background_tasks": wanted}
    post(http, "/api/chat/completions", request | {"params": {"function_calling": "native"}})

    def message() -> Any:
        found = http.get(f"/api/v1/chats/{chat_id}").json()["chat"]["history"]["messages"][answered]
        return found if found.get("done") else None

    text = str(until("the answer", ANSWER_S, message)["content"])
    time.sleep(BACKGROUND_S)  # its requests in the background are part of the session
    return text


def run(url: str, task: str) -> str:
    """Start the server, and ask it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("open-webui"))
    with (Path.home() / "open-webui.log").open("w") as log:
        server = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", port],
            env={**os.environ, **settings(url)},
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as http:
            return talk(http, task)
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    _, address, _, text = sys.argv
    print(run(address, text))
