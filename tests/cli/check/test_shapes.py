"""The shapes that are demanded of servers, against the types of the official clients."""

from __future__ import annotations

import anthropic.types as a
import msgspec
import openai.types as o
import openai.types.chat as c
import openai.types.responses as r
import pytest
from openai.types.chat import chat_completion, chat_completion_chunk
from openai.types.create_embedding_response import Usage as EmbeddingUsage

from moeflow.cli.check import anthropic_shapes, openai_shapes, responses_shapes

PAIRS = [
    (openai_shapes.Model, o.Model),
    (openai_shapes.Usage, o.CompletionUsage),
    (openai_shapes.Completion, o.Completion),
    (openai_shapes.CompletionChoice, o.CompletionChoice),
    (openai_shapes.CompletionPart, o.CompletionChoice),
    (openai_shapes.CompletionChunk, o.Completion),
    (openai_shapes.ChatCompletion, c.ChatCompletion),
    (openai_shapes.Choice, chat_completion.Choice),
    (openai_shapes.Message, c.ChatCompletionMessage),
    (openai_shapes.ToolCall, c.ChatCompletionMessageFunctionToolCall),
    (openai_shapes.ContentLogprob, c.ChatCompletionTokenLogprob),
    (openai_shapes.ChatChunk, c.ChatCompletionChunk),
    (openai_shapes.ChoicePart, chat_completion_chunk.Choice),
    (openai_shapes.Delta, chat_completion_chunk.ChoiceDelta),
    (openai_shapes.ToolCallPart, chat_completion_chunk.ChoiceDeltaToolCall),
    (openai_shapes.Error, o.ErrorObject),
    (openai_shapes.Embeddings, o.CreateEmbeddingResponse),
    (openai_shapes.EmbeddingUsage, EmbeddingUsage),
    (openai_shapes.Embedding, o.Embedding),
    (anthropic_shapes.Message, a.Message),
    (anthropic_shapes.Usage, a.Usage),
    (anthropic_shapes.MessageStart, a.RawMessageStartEvent),
    (anthropic_shapes.BlockStart, a.RawContentBlockStartEvent),
    (anthropic_shapes.BlockDelta, a.RawContentBlockDeltaEvent),
    (anthropic_shapes.BlockStop, a.RawContentBlockStopEvent),
    (anthropic_shapes.MessageDelta, a.RawMessageDeltaEvent),
    (anthropic_shapes.DeltaUsage, a.MessageDeltaUsage),
    (anthropic_shapes.ToolUseBlock, a.ToolUseBlock),
    (anthropic_shapes.ErrorAnswer, a.ErrorResponse),
    (anthropic_shapes.TokenCount, a.MessageTokensCount),
    (responses_shapes.Response, r.Response),
    (responses_shapes.Usage, r.ResponseUsage),
    (responses_shapes.OutputText, r.ResponseOutputText),
]
# The API references require more than the clients' types.
DOCUMENTED = {
    "Response": {"status"},
    "Completion": {"usage"},
    "ChatCompletion": {"usage"},
    "Message": {"content", "stop_sequence", "stop_reason"},
}


@pytest.mark.parametrize(("shape", "official"), PAIRS, ids=lambda it: f"{it.__module__.split('.')[0]}.{it.__name__}")
def test_no_shape_demands_more_than_the_api(shape, official):
    fields = msgspec.structs.fields(shape)
    known = official.model_fields
    assert {it.name for it in fields} <= set(known)
    demanded = {it.name for it in fields if it.required and not known[it.name].is_required()}
    assert demanded <= DOCUMENTED.get(shape.__name__, set())
