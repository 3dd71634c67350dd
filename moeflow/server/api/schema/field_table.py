"""The table of fields that other APIs and clients send: each is ignored, mapped to our field, or refused with a reason.

The keys are the names of our request objects. A row of a base class holds for the classes that extend it.
`--unknown-fields` decides about all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.server.api.schema.field_policy import (
    VARIABLES,
    Converted,
    FieldParts,
    Ignored,
    Mapped,
    Policy,
    Refused,
    Unset,
)

_HINT = Ignored("a hint for another server")
_CACHE = Ignored("the prefix cache keeps prompts without a request")
_LABEL = Ignored("a label of the client")
_COPY = Ignored("the message has the same text in another field")
_SUFFIX = Refused("the models here continue text, they do not fill gaps", ("",))
_OLD = "use tools, its newer form"
_TEXT_ONLY = "the model reads and writes text only"
_CITATIONS = Ignored("answers cite nothing")
_BY_THE_MODEL = Refused("only the model calls tools", ({"type": "direct"},))
_ONLY_THE_MODEL = Refused("only the model calls tools", (["direct"],))
_DEFERRED = Ignored("the model sees the descriptions of all tools")
_ASYNC = Refused("calls end with their results", (False,))
_OFFERED: Final[Mapping[str, Policy]] = {
    "allowed_callers": _ONLY_THE_MODEL,
    "async": _ASYNC,
    "defer_loading": _DEFERRED,
}
_NO_SAMPLER = "this server has no such sampler"
_SWITCHES = ("enable_thinking", "thinking")  # names that chat templates know
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("enabled", "adaptive", "disabled")
_VERBOSITY = Refused("it is low, medium or high; none of them changes the answer", ("low", "medium", "high"))


def _thinking(is_on: Any) -> dict[str, Any]:
    """Return the variables of the chat template that switch reasoning."""
    if not isinstance(is_on, bool):
        raise ValueError("must be true or false")
    return {VARIABLES: dict.fromkeys(_SWITCHES, is_on)}


def _think(value: Any) -> dict[str, Any]:
    """Convert Ollama's `think`: true, false, or an effort."""
    return {"reasoning_effort": value} if isinstance(value, str) else _thinking(value)


def _thinking_object(value: Any) -> dict[str, Any]:
    """Convert Anthropic's `thinking`, which some servers take in chat completions."""
    if not isinstance(value, dict) or value.get("type") not in _THINKING_TYPES:
        raise ValueError("must be an object of type enabled, adaptive or disabled")
    budget = {} if value.get("budget_tokens") is None else {"thinking_token_budget": value["budget_tokens"]}
    return _thinking(value["type"] != "disabled") | budget


def _generate(value: Any) -> dict[str, Any]:
    """Convert `generate`, which is false where a client only warms the prompt cache."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return {} if value else {"max_output_tokens": 1}


_THINKING_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*_THINKING_TYPES]},
        "budget_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31},
    },
}
_ENABLED = Converted("chat_template_kwargs.enable_thinking", _thinking, {"type": "boolean"})
# Ollama's.
_NUMBER: Final = Ignored("the server chooses", "number")
_SWITCH: Final = Ignored("the server chooses", "boolean")
_MACHINE: Final[Mapping[str, Policy]] = {
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "draft_num_predict"), _NUMBER),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), _NUMBER),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"), _SWITCH),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only", "penalize_newline"), _SWITCH),
}
_OPTIONS = FieldParts(
    {
        "num_predict": Mapped("max_tokens"),
        "repeat_penalty": Mapped("repetition_penalty"),
        **{name: Mapped(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
        **{name: Mapped(name) for name in ("presence_penalty", "frequency_penalty")},
        "num_ctx": _NUMBER,
        **_MACHINE,
    }
)
# OpenRouter's, and that of OpenAI's responses.
_REASONING = FieldParts(
    {
        "effort": Mapped("reasoning_effort"),
        "max_tokens": Mapped("thinking_token_budget"),
        "enabled": _ENABLED,
        "summary": _HINT,
        "exclude": Refused("the answer has the reasoning as it is", (False,)),
    }
)
_NO_LIMIT = Unset((-1, -2))
_FORMAT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
    "additionalProperties": {"type": "null"},
}
_NOTES_OF_LITELLM: Final[Mapping[str, Policy]] = {
    "provider_specific_fields": _LABEL,
    "index": _LABEL,
    "extra_content": _LABEL,
    "cache_control": _CACHE,
}

FIELD_TABLE: Final[Mapping[str, Mapping[str, Policy]]] = {
    # All endpoints that generate.
    "SamplerFields": {
        "keep_alive": Ignored("models stay loaded while memory allows"),
        "cache_prompt": _CACHE,
        "id_slot": Ignored("there are no slots; every request can use every cached prompt"),
        "client_metadata": _LABEL,
        "metadata": _LABEL,
        "user": _LABEL,
        "user_id": _LABEL,
        "session_id": _LABEL,
        "safety_identifier": _LABEL,
        "service_tier": _HINT,
        "prompt_cache_key": _CACHE,
        "prompt_cache_retention": _CACHE,
        "prompt_cache_options": _CACHE,
        "priority": Refused("requests have no priorities", (0,)),
        "typical_p": Refused(_NO_SAMPLER, (1,)),
        "tfs_z": Refused(_NO_SAMPLER, (1,)),
        "top_n_sigma": Refused(_NO_SAMPLER, (-1, 0)),
        "mirostat": Refused(_NO_SAMPLER, (0,)),
        "xtc_probability": Refused(_NO_SAMPLER, (0,)),
        "dry_multiplier": Refused(_NO_SAMPLER, (0,)),
        "dynatemp_range": Refused(_NO_SAMPLER, (0,)),
        "use_beam_search": Refused(_NO_SAMPLER, (False,)),
        "length_penalty": Refused(_NO_SAMPLER, (1,)),
        "repeat_penalty": Mapped("repetition_penalty"),
    },
    # Chat completions and completions.
    "SamplingFields": {
        "n_predict": Mapped("max_tokens"),
        "num_predict": Mapped("max_tokens"),
        "max_new_tokens": Mapped("max_tokens"),
        "max_tokens": _NO_LIMIT,
        "stop": Unset(("",)),
        "guided_grammar": Unset(("",)),
        "grammar": Mapped("guided_grammar"),
        "json_schema": Mapped("guided_json"),
        "options": _OPTIONS,
    },
    "StreamOptions": {
        "include_obfuscation": _HINT,
        "continuous_usage_stats": Refused("usage comes at the end", (False,)),
    },
    "CompletionRequest": {"suffix": _SUFFIX},
    "ChatRequest": {
        "max_completion_tokens": _NO_LIMIT,
        "reasoning": _REASONING,
        "enable_thinking": _ENABLED,
        "think": Converted(
            "chat_template_kwargs.enable_thinking, reasoning_effort",
            _think,
            {"anyOf": [{"type": "boolean"}, {"enum": [*_EFFORTS]}]},
        ),
        "thinking": Converted(
            "chat_template_kwargs.enable_thinking, thinking_token_budget", _thinking_object, _THINKING_SCHEMA
        ),
        "store": Ignored("chat completions are not kept"),
        "prediction": _HINT,
        "verbosity": _VERBOSITY,
        "functions": Refused(_OLD, ([],)),
        "function_call": Refused(_OLD, ("none", "auto")),
        "modalities": Refused("answers are text", (["text"], [])),
        "audio": Refused("answers are text"),
        "moderation": Refused("nothing is moderated here"),
        "web_search_options": Refused("this server does not search the web"),
        "echo": Refused("answers never repeat the conversation", (False,)),
    },
    "ChatMessage": {
        "reasoning": Mapped("reasoning_content"),
        "thinking": Mapped("reasoning_content"),
        "tool_name": Mapped("name"),
        "reasoning_details": _COPY,
        "thinking_blocks": _COPY,
        "parsed": _COPY,
        "annotations": _LABEL,
        "id": _LABEL,
        **_NOTES_OF_LITELLM,
        "function_call": Refused(_OLD),
        "audio": Refused(_TEXT_ONLY),
        "images": Refused(_TEXT_ONLY, ([],)),
        "refusal": Refused("put the text into content", ("",)),
    },
    "TextPart": {"annotations": _LABEL, **_NOTES_OF_LITELLM},
    "ToolCall": _NOTES_OF_LITELLM,
    "CalledFunction": {"parsed_arguments": _COPY, **_NOTES_OF_LITELLM},
    "ToolDefinition": {"cache_control": _CACHE, "defer_loading": _DEFERRED},
    "FunctionDefinition": {"cache_control": _CACHE, "defer_loading": _DEFERRED},
    # Embeddings and classes.
    "EmbeddingRequest": {"user": _LABEL, "keep_alive": _HINT},
    "ClassificationRequest": {"user": _LABEL},
    "ScoringFields": {"user": _LABEL},
    # Ollama's API.
    "OllamaOptions": {
        **_MACHINE,
        "mirostat": Refused(_NO_SAMPLER, (0,)),
        "tfs_z": Refused(_NO_SAMPLER, (1,)),
        "typical_p": Refused(_NO_SAMPLER, (1,)),
    },
    "OllamaMessage": {"images": Refused(_TEXT_ONLY, ([],))},
    "OllamaGenerateRequest": {
        "images": Refused(_TEXT_ONLY, ([],)),
        "suffix": _SUFFIX,
        "template": Refused("send a whole prompt with raw: true instead", ("",)),
    },
    # Responses.
    "ResponseInput": {
        "conversation": Refused("send all of it as input, or previous_response_id"),
        "personality": Refused("state in the instructions what the answer should be like"),
    },
    "ResponseRequest": {
        "access_programs": Refused("there are none here"),
        "background": Refused("ask /v1/batches for answers later", (False,)),
        "context_management": Refused("conversations are not shortened", ([],)),
        "generate": Converted("max_output_tokens", _generate, {"type": "boolean"}),
        "image": Refused("the model reads text only"),
        "moderation": Refused("nothing is moderated here"),
        "prompt": Refused("there are no stored prompts; send input and instructions"),
    },
    "ResponseStreamOptions": {"include_obfuscation": _HINT},
    "ReasoningConfig": {
        "context": Ignored("the chat template chooses which reasoning the model sees again"),
        "mode": Refused("there is one mode", ("standard",)),
    },
    "TextConfig": {"verbosity": _VERBOSITY},
    "FunctionTool": {**_OFFERED, "output_schema": _HINT},
    "FreeformTool": _OFFERED,
    "InputText": {"prompt_cache_breakpoint": _CACHE},
    "SaidText": {"annotations": _LABEL, "logprobs": _LABEL},
    "ItemFields": {
        "created_by": _LABEL,
        "internal_chat_message_metadata_passthrough": _LABEL,
    },
    "Message": {"phase": _LABEL},
    "FunctionCall": {"caller": _BY_THE_MODEL, "async": _ASYNC},
    "CustomToolCall": {"caller": _BY_THE_MODEL, "async": _ASYNC},
    "FunctionCallOutput": {"caller": _BY_THE_MODEL},
    # Messages.
    "Block": {"cache_control": _CACHE},
    "TextBlock": {"citations": _LABEL},
    "DocumentBlock": {"citations": _CITATIONS},
    "SearchResultBlock": {"citations": _CITATIONS},
    "ImageBlock": {"transformations": _HINT},
    "ToolUseBlock": {"caller": _LABEL, "toolset_name": _LABEL},
    "ToolResultBlock": {"caller": _LABEL, "toolset_name": _LABEL},
    "SystemMessage": {
        "clear_at": Ignored("the message stays, so that the prefix cache serves the next request"),
        "output_config": Ignored("the request's own counts"),
    },
    "CustomTool": {
        "allowed_callers": Ignored("only the model calls tools"),
        "cache_control": _CACHE,
        "defer_loading": _DEFERRED,
        "eager_input_streaming": Ignored("inputs are always streamed as they come"),
    },
    "ShownThinking": {"block_binding": Ignored("signatures of thoughts are not checked")},
    "OutputConfig": {"task_budget": _HINT},
    "CountRequest": dict.fromkeys(
        ("max_tokens", "stream", "metadata", "service_tier", "stop_sequences", "temperature", "top_k", "top_p"),
        Ignored("the count does not depend on it"),
    ),
    "MessageInput": {
        "cache_control": _CACHE,
        "billing_policy": Refused("nothing is billed here"),
        "compaction": Refused("conversations are not shortened"),
        "diagnostics": _HINT,
        "fallback_credit_token": _HINT,
        "fallbacks": _HINT,
        "inference_geo": Refused("answers are computed here"),
        "output_format": Converted(
            "output_config.format", lambda value: {"output_config": {"format": value}}, _FORMAT_SCHEMA
        ),
        "speed": _HINT,
        "thread": Refused("send the whole conversation; its beginning is in the cache"),
        "user_profile_id": Refused("there are no profiles here"),
        "workspace_id": Refused("there are no workspaces here"),
    },
}
