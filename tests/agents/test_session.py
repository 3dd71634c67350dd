"""The session of the agents through the official clients, with each kind of template; an edit that did not happen."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import anthropic
import openai
import pytest

from tests.agents.scripted_server import MODEL, scripted_server
from tests.agents.session import AFTER, COMMAND, FINAL, TASK, Call, begin, missing, scripted_answers
from tests.agents.templates import TEMPLATES

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CALLS = [
    Call("shell", {"command": "cat notes.txt"}),
    Call("shell", {"command": "sed -i s/red/green/ notes.txt"}),
    Call("shell", {"command": COMMAND}),
]


def shell(command: str, folder: Path) -> str:
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout


def talk_chat(url: str, folder: Path) -> str:
    messages = [{"role": "system", "content": "You edit files."}, {"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(8):
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
            if not message.tool_calls:
                return message.content
            calls = [{"id": c.id, "type": c.type, "function": c.function.to_dict()} for c in message.tool_calls]
            for call in calls:
                call["function"].pop("parsed_arguments", None)
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            for call in calls:
                output = shell(json.loads(call["function"]["arguments"])["command"], folder)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    raise AssertionError("no end")


def talk_responses(url: str, folder: Path) -> str:
    items = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(8):
            with client.responses.stream(model=MODEL, input=items, tools=tools, store=False) as stream:
                response = stream.get_final_response()
            items += [item.to_dict(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for item in items:
                item.pop("parsed_arguments", None)
            for call in calls:
                output = shell(json.loads(call.arguments)["command"], folder)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    raise AssertionError("no end")


def talk_messages(url: str, folder: Path) -> str:
    messages = [{"role": "user", "content": TASK}]
    tools = [{"name": "shell", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(8):
            with client.messages.stream(model=MODEL, max_tokens=999, messages=messages, tools=tools) as stream:
                message = stream.get_final_message()
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return message.content[0].text
            blocks = [{"type": c.type, "id": c.id, "name": c.name, "input": c.input} for c in calls]
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": shell(c.input["command"], folder)}
                for c in calls
            ]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    raise AssertionError("no end")


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_protocol_completes_the_session(template, tmp_path):
    kind = TEMPLATES[template]
    with scripted_server(kind, scripted_answers(kind, CALLS)) as (url, exchanges):
        for talk in (talk_chat, talk_responses, talk_messages):
            folder = tmp_path / talk.__name__
            begin(folder)
            assert missing(folder) == "notes.txt was not edited"
            assert talk(url, folder) == FINAL
            assert missing(folder) == ""
    assert [one.status for one in exchanges] == [200] * 3 * (len(CALLS) + 1)
    assert all(json.loads(one.request)["stream"] for one in exchanges)


def test_a_command_before_the_edit_is_no_session(tmp_path):
    begin(tmp_path)
    shell(COMMAND, tmp_path)
    (tmp_path / "notes.txt").write_text(AFTER)
    assert missing(tmp_path) == "the command did not run after the edit"
