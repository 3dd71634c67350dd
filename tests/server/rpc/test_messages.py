"""`moeflow.proto` mirrors the HTTP API: all fields, both ways; the generated module is that of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct, Value
from pydantic import BaseModel

from moeflow.server.api.chat.chat_objects import ChatChunk, ChatRequest, ChatResponse
from moeflow.server.api.completions.completion_objects import CompletionChunk, CompletionRequest, CompletionResponse
from moeflow.server.guard.strict_json import MAX_CONTAINERS, MAX_VALUES, JsonError
from moeflow.server.rpc import moeflow_pb2, rpc_server
from moeflow.server.rpc.messages import answer_message, request_body, streamed_objects

FOLDER = Path(rpc_server.__file__).parent
MODELS = (CompletionRequest, ChatRequest, CompletionResponse, CompletionChunk, ChatResponse, ChatChunk)


def message(name: str, **fields: Any) -> Any:
    return GetMessageClass(moeflow_pb2.DESCRIPTOR.message_types_by_name[name])(**fields)


def body_of(request: Any, *, is_streamed: bool) -> Any:
    return json.loads(request_body(type(request), request.SerializeToString(), is_streamed=is_streamed))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in models_in(part)]


def differences(model: type[BaseModel], descriptor: Descriptor, path: str = "") -> list[str]:
    """Return the fields that only one of them has, with their paths. JSON values may hold anything."""
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    found = [f"{path}{name}" for name in fields.keys() ^ descriptor.fields_by_name.keys()]
    for name, annotation in fields.items():
        inner = descriptor.fields_by_name[name].message_type if name in descriptor.fields_by_name else None
        if inner is not None and inner.file is descriptor.file:
            for each in models_in(annotation):
                found += differences(each, inner, f"{path}{name}.")
    return found


def test_messages_have_the_fields_of_the_http_api():
    found = {
        model.__name__: differences(model, moeflow_pb2.DESCRIPTOR.message_types_by_name[model.__name__])
        for model in MODELS
    }
    expected = {
        "CompletionRequest": {"stream", "prompt_token_ids"},
        "ChatRequest": {"stream", "messages.tool_calls.index"},  # the place of a call is one of chunks
        "ChatResponse": {"choices.message.tool_calls.index"},
    }
    assert {name: set(fields) for name, fields in found.items() if fields} == expected


def test_the_generated_module_is_that_of_the_file(tmp_path):
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(FOLDER),
        f"--python_out={tmp_path}",
        "moeflow.proto",
    ]
    subprocess.run(command, check=True)
    assert (tmp_path / "moeflow_pb2.py").read_text() == (FOLDER / "moeflow_pb2.py").read_text()


def test_a_request_is_the_json_of_http():
    schema = {"type": "object", "properties": {"a": {"maxItems": 2, "type": ["array", "null"]}}}
    request = message(
        "ChatRequest",
        messages=[message("ChatMessage", role="user", content="")],
        temperature=0.0,
        top_p=0.1,
        seed=2**62 + 1,
        stop=["a"],
        logit_bias={"7": -1.5},
        tools=[Struct()],
        response_format=Value(),
        stream_options=message("StreamOptions", include_usage=False),
    )
    request.tools[0].update(schema)
    request.response_format.struct_value.update({"type": "text"})
    assert body_of(request, is_streamed=True) == {
        "messages": [{"role": "user", "content": ""}],
        "temperature": 0.0,
        "top_p": 0.1,
        "seed": 2**62 + 1,
        "stop": ["a"],
        "logit_bias": {"7": -1.5},
        "tools": [schema],
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": False},
        "stream": True,
    }


def test_prompts_are_texts_or_token_ids():
    ids = [message("TokenIds", ids=[1, 2]), message("TokenIds", ids=[3])]
    for given, prompt in (
        ({"prompt": ["a", "b"]}, ["a", "b"]),
        ({"prompt_token_ids": ids}, [[1, 2], [3]]),
        ({"prompt_token_ids": [message("TokenIds")]}, [[]]),
    ):
        assert body_of(message("CompletionRequest", **given), is_streamed=False)["prompt"] == prompt


@pytest.mark.parametrize("field", ["prompt_token_ids", "ids", "prompt", "response_format"])
def test_messages_with_too_many_values_are_refused_before_their_conversion(field, monkeypatch):
    monkeypatch.setattr(json_format, "MessageToDict", None)
    request = message("CompletionRequest")
    if field == "response_format":
        request.response_format.list_value.values.extend([Value(null_value=0)] * (MAX_CONTAINERS + 1))
        request.response_format.list_value.values.add().struct_value.update({"a": []})
    elif field == "prompt":
        request.prompt.extend([""] * (MAX_VALUES + 1))
    elif field == "ids":
        request.prompt_token_ids.add().ids.extend([1] * (MAX_VALUES + 1))
    else:
        request.prompt_token_ids.extend([message("TokenIds")] * (MAX_CONTAINERS + 1))
    with pytest.raises(JsonError, match=f"more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} messages"):
        request_body(type(request), request.SerializeToString(), is_streamed=False)


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(JsonError, match="no JSON"):
        request_body(type(message("ChatRequest")), b"\xff", is_streamed=False)


def test_an_answer_with_null_and_a_field_to_come():
    body = {"id": "a", "created": 2**40, "new": 1, "choices": [{"index": 0, "finish_reason": None, "text": "é"}]}
    body["choices"][0]["logprobs"] = {
        "tokens": ["é"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    answer = answer_message(type(message("CompletionChunk")), body)
    assert (answer.created, answer.choices[0].text) == (2**40, "é")
    assert list(answer.choices[0].logprobs.token_logprobs) == [None]
    assert not answer.choices[0].HasField("finish_reason")


@pytest.mark.parametrize(
    ("piece", "objects"),
    [
        (b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n', [{"a": 1}, {"b": 2}]),
        (b": ping\n\n", []),
        (b'data: {"error":{"message":"no"}}\n\n', []),
        (b'{"error":{"message":"no"}}', []),
    ],
)
def test_pieces_of_a_stream(piece, objects):
    assert streamed_objects(piece) == objects
    assert NoneType not in map(type, objects)
