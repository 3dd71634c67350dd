"""The tools that the programs of this folder offer to a model, and their descriptions for plain libraries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

COMMAND_S = 30


def read_file(path: str) -> str:
    """Return the text of a file in the working folder."""
    return Path(path).read_text()


def replace_text(path: str, old: str, new: str) -> str:
    """Replace a text in a file of the working folder."""
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "done"


def run_command(command: str) -> str:
    """Run a shell command in the working folder and return its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout


TOOLS = {"read_file": read_file, "replace_text": replace_text, "run_command": run_command}
DESCRIBED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.__doc__,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"} for parameter in parameters},
                "required": list(parameters),
            },
        },
    }
    for name, tool, parameters in (
        ("read_file", read_file, ("path",)),
        ("replace_text", replace_text, ("path", "old", "new")),
        ("run_command", run_command, ("command",)),
    )
]


def called(name: str, arguments: str | Mapping[str, str]) -> str:
    """Return the result of a call; arguments are an object or its JSON."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return TOOLS[name](**given)
