"""Lines of a job's input, and files of them."""

from __future__ import annotations

import json
from pathlib import Path

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, text: str = "Hello", url: str = CHAT, **body) -> bytes:
    body = {"messages": [{"role": "user", "content": text}]} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def completion_line(custom_id: str, prompt: str = "x", **body) -> bytes:
    body = {"prompt": prompt} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def response_line(custom_id: str, text: str = "Hello", **body) -> bytes:
    body = {"input": text} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}).encode()


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
