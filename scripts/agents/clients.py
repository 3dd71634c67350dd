"""The clients that registries carry: packages, tools, commands and settings of each, for one session.

Updates and telemetry are switched off by settings that each client documents. Everything a client writes lies below
its own home folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.agents.scripted_server import MODEL
from tests.agents.session import AFTER, BEFORE, COMMAND, FINAL, TASK, Call

PROGRAMS = Path(__file__).parent
KEY = "none"
_PATCH = f"*** Begin Patch\n*** Update File: notes.txt\n@@\n-{BEFORE}+{AFTER}*** End Patch\n"


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one session, and the server's address."""

    programs: Path  # of the installed package
    home: Path
    work: Path
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class AgentClient:
    """A client, the calls of its tools that make up the session, and the commands that run it."""

    name: str
    package: str
    installer: Literal["npm", "pip"]
    protocol: str
    commands: Callable[[Place], list[list[str]]]
    calls: Callable[[str], Sequence[Call]] = lambda _: ()  # from the file's path
    environment: Callable[[Place], Mapping[str, str]] = lambda _: {}
    final: str = FINAL  # the model's last answer
    model: str = MODEL  # the name under which it is served


def _claude_code(place: Place) -> list[list[str]]:
    allowed = ["--allowedTools", "Read,Edit,Bash"]
    return [[str(place.programs / "claude"), "-p", TASK, "--output-format", "json", "--model", place.model, *allowed]]


def _claude_code_environment(place: Place) -> dict[str, str]:
    off = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    return {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_API_KEY": KEY, **dict.fromkeys(off, "1")}


def _codex(place: Place) -> list[list[str]]:
    provider = f'{{name="local", base_url="{place.url}/v1", wire_api="responses", request_max_retries=0}}'
    settings = ['model_provider="local"', f"model_providers.local={provider}"]
    settings += ["analytics.enabled=false", "check_for_update_on_startup=false"]
    command = [str(place.programs / "codex"), "exec", "--json", "--skip-git-repo-check", "-m", place.model]
    command += ["--dangerously-bypass-approvals-and-sandbox"]  # the folder is its own, and so is the script's model
    return [[*command, *(word for setting in settings for word in ("-c", setting)), TASK]]


def _opencode(place: Place) -> list[list[str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": KEY},
        "models": {place.model: {}},
    }
    settings = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    (place.home / "opencode.json").write_text(json.dumps(settings))
    return [[str(place.programs / "opencode"), "run", "-m", f"local/{place.model}", TASK]]


def _opencode_environment(place: Place) -> dict[str, str]:
    off = ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD")
    return {"OPENCODE_CONFIG": str(place.home / "opencode.json"), **dict.fromkeys(off, "1")}


def _cline(place: Place) -> list[list[str]]:
    program = str(place.programs / "cline")
    provider = [program, "auth", "-p", "openai", "-k", KEY, "-m", place.model, "-b", f"{place.url}/v1"]
    return [provider, [program, "--json", "-c", str(place.work), "-P", "openai", "-m", place.model, TASK]]


def _continue(place: Place) -> list[list[str]]:
    model = {
        "name": place.model,
        "provider": "openai",
        "model": place.model,
        "apiBase": f"{place.url}/v1",
        "apiKey": KEY,
    }
    model |= {"roles": ["chat"], "capabilities": ["tool_use"]}
    file = place.home / "config.yaml"  # JSON is YAML, too
    file.write_text(json.dumps({"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}))
    return [[str(place.programs / "cn"), "--config", str(file), "--auto", "-p", TASK]]


def _aider(place: Place) -> list[list[str]]:
    command = [
        str(place.programs / "aider"),
        "--model",
        f"openai/{place.model}",
        "--openai-api-base",
        f"{place.url}/v1",
    ]
    command += ["--openai-api-key", KEY, "--message", TASK, "--yes-always", "--no-git", "--edit-format", "diff"]
    command += ["--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
    return [[*command, "--auto-test", "--test-cmd", COMMAND, "notes.txt"]]


def _program(name: str, protocol: str) -> Callable[[Place], list[list[str]]]:
    script = str(PROGRAMS / f"with_{name}.py")
    return lambda place: [[str(place.programs / "python"), script, place.url, protocol, TASK]]


def _own_tools(file: str) -> tuple[Call, ...]:
    """Return calls of the tools in `file_tools.py`."""
    return (
        Call("read_file", {"path": file}),
        Call("replace_text", {"path": file, "old": "red", "new": "green"}),
        Call("run_command", {"command": COMMAND}),
    )


def _with_library(name: str, package: str, program: str, protocols: Sequence[str]) -> list[AgentClient]:
    return [
        AgentClient(
            name if len(protocols) == 1 else f"{name}-{protocol}",
            package,
            "pip",
            "chat" if protocol == "proxy" else protocol,
            _program(program, protocol),
            _own_tools,
            lambda _: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        for protocol in protocols
    ]


CLIENTS = [
    AgentClient(
        "codex",
        "@openai/codex",
        "npm",
        "responses",
        _codex,
        lambda _: (
            Call("exec_command", {"cmd": "cat notes.txt"}),
            Call("exec_command", {"cmd": "sed -i s/red/green/ notes.txt"}),
            Call("exec_command", {"cmd": COMMAND}),
        ),
    ),
    AgentClient(  # a name that Codex knows: it edits with a custom tool
        "codex-patch",
        "@openai/codex",
        "npm",
        "responses",
        _codex,
        lambda _: (
            Call("exec_command", {"cmd": "cat notes.txt"}),
            Call("apply_patch", {"input": _PATCH}),
            Call("exec_command", {"cmd": COMMAND}),
        ),
        model="gpt-5.5",
    ),
    AgentClient(  # another one: its tools are items of the input, and the model writes programs that call them
        "codex-programs",
        "@openai/codex",
        "npm",
        "responses",
        _codex,
        lambda _: tuple(
            Call("functions__exec", {"input": f"text(await tools.exec_command({json.dumps({'cmd': command})}))"})
            for command in ("cat notes.txt", "sed -i s/red/green/ notes.txt", COMMAND)
        ),
        model="gpt-5.6-sol",
    ),
    AgentClient(
        "claude-code",
        "@anthropic-ai/claude-code",
        "npm",
        "messages",
        _claude_code,
        lambda file: (
            Call("Read", {"file_path": file}),
            Call("Edit", {"file_path": file, "old_string": "red", "new_string": "green"}),
            Call("Bash", {"command": COMMAND, "description": "Show the file"}),
        ),
        _claude_code_environment,
    ),
    AgentClient(
        "opencode",
        "opencode-ai",
        "npm",
        "chat",
        _opencode,
        lambda file: (
            Call("read", {"filePath": file}),
            Call("edit", {"filePath": file, "oldString": "red", "newString": "green"}),
            Call("bash", {"command": COMMAND, "description": "Show the file"}),
        ),
        _opencode_environment,
    ),
    AgentClient(
        "cline",
        "cline",
        "npm",
        "chat",
        _cline,
        lambda file: (
            Call("read_files", {"files": [{"path": file}]}),
            Call("editor", {"path": file, "old_text": "red", "new_text": "green"}),
            Call("run_commands", {"commands": [COMMAND]}),
        ),
        lambda _: {"CLINE_TELEMETRY_DISABLED": "1"},
    ),
    AgentClient(
        "continue",
        "@continuedev/cli",
        "npm",
        "chat",
        _continue,
        lambda file: (
            Call("Read", {"filepath": file}),
            Call("Edit", {"file_path": file, "old_string": "red", "new_string": "green"}),
            Call("Bash", {"command": COMMAND}),
        ),
        lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    AgentClient(
        "aider",
        "aider-chat",
        "pip",
        "chat",
        _aider,
        environment=lambda _: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        final=f"notes.txt\n```\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n",
    ),
    *_with_library("litellm", "litellm[proxy]", "litellm", ("chat", "proxy")),
    *_with_library("openai-agents", "openai-agents", "openai_agents", ("chat", "responses")),
    *_with_library(
        "pydantic-ai", "pydantic-ai-slim[openai,anthropic]", "pydantic_ai", ("chat", "responses", "messages")
    ),
    *_with_library("langchain", "langchain-openai", "langchain", ("chat", "responses")),
    *_with_library("open-webui", "open-webui", "open_webui", ("chat",)),
]
