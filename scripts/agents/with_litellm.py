"""A session through litellm: with_litellm.py URL PROTOCOL TASK. Protocols: chat (streamed), proxy.

`proxy` starts litellm's proxy before the server, and asks it with OpenAI's client.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import litellm
import openai
from file_tools import DESCRIBED, called

START_S = 90
MAX_TURNS = 8
PROXY_KEY = "sk-local"


def talk(answer_to: Any, task: str) -> str:
    """Answer calls until the model has none. `answer_to` maps a conversation to the next message."""
    messages: list[Any] = [{"role": "system", "content": "You edit files."}, {"role": "user", "content": task}]
    for _ in range(MAX_TURNS):
        message = answer_to(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            result = called(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise SystemExit("the model calls tools without end")


def directly(url: str, task: str) -> str:
    """Use the library."""

    def answer_to(messages: list[Any]) -> Any:
        chunks = litellm.completion(
            model="openai/scripted",
            api_base=f"{url}/v1",
            api_key="none",
            messages=messages,
            tools=DESCRIBED,
            stream=True,
            stream_options={"include_usage": True},
            num_retries=0,
        )
        whole = litellm.stream_chunk_builder(list(chunks), messages=messages)
        return whole.choices[0].message.model_dump(exclude_none=True)

    return talk(answer_to, task)


def through_proxy(url: str, task: str) -> str:
    """Use the proxy, on a free port of loopback."""
    entry = {
        "model_name": "local",
        "litellm_params": {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "none"},
    }
    config = Path.home() / "proxy.yaml"
    config.write_text(json.dumps({"model_list": [entry], "general_settings": {"master_key": PROXY_KEY}}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("litellm"))
    with (Path.home() / "proxy.log").open("w") as log:
        proxy = subprocess.Popen(
            [program, "--config", str(config), "--host", "127.0.0.1", "--port", port], stdout=log, stderr=log
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health/liveliness", proxy)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=PROXY_KEY, max_retries=0) as client:

            def answer_to(messages: list[Any]) -> Any:
                with client.chat.completions.stream(model="local", messages=messages, tools=DESCRIBED) as stream:
                    return stream.get_final_completion().choices[0].message.to_dict()

            return talk(answer_to, task)
    finally:
        proxy.terminate()
        proxy.wait(30)


def _wait_for(url: str, proxy: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit("litellm's proxy did not start")


if __name__ == "__main__":
    _, address, protocol, text = sys.argv
    print({"chat": directly, "proxy": through_proxy}[protocol](address, text))
