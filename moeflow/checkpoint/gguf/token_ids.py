"""The ids of a GGUF file's special tokens, as keys of a `generation_config.json`.

That file lists all tokens that end a turn. Conversions to GGUF write one, so answers of Gemma 3, Phi-3.5-MoE or gpt-oss
would run past their end. llama.cpp finds the others by their texts. Here the chat template must have them as well, so
that base models stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.gguf.header import PassedArray
from moeflow.core.model_config import ConfigReader

NO_TOKEN: Final = 2**32 - 1  # -1, as older conversions write for tokens that a model does not have
TOKENS: Final = "tokenizer.ggml.tokens"
TURN_ENDS: Final = frozenset(
    (
        "<|im_end|>",  # ChatML: Qwen, LFM2, Kimi
        *("<|eot_id|>", "<|eom_id|>"),  # Llama 3
        *("<|return|>", "<|call|>"),  # gpt-oss
        "<|end|>",  # Phi
        "<|end_of_text|>",  # Granite
        "<end_of_turn>",  # Gemma 3
        *("<turn|>", "<|tool_response>"),  # Gemma 4
        "[e~[",  # MiniMax
    )
)
_CALL, _MESSAGE_END = "<|call|>", "<|end|>"  # gpt-oss has both; the second ends a message there, not the turn


def translate_token_ids(metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the ids that the file declares, by the keys of a `generation_config.json`.

    `eos_token_id` is a list where a turn ends in more ways than the text. Raises: CheckpointError.
    """
    reader = ConfigReader(metadata, file)
    kinds = ("bos", "eos", "eot", "eom", "padding")
    ids = {kind: reader.get(int, f"tokenizer.ggml.{kind}_token_id", NO_TOKEN) for kind in kinds}
    ids = {kind: number for kind, number in ids.items() if 0 <= number < NO_TOKEN}
    config = {f"{name}_token_id": ids[kind] for name, kind in (("bos", "bos"), ("pad", "padding")) if kind in ids}
    ends = list(dict.fromkeys(ids[kind] for kind in ("eos", "eot", "eom") if kind in ids))
    return config | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def with_turn_ends(token_ids: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `generation_config.json` with all ends of a turn; metadata may lack the vocabulary."""
    template, tokens = metadata.get("tokenizer.chat_template"), metadata.get(TOKENS)
    if not isinstance(template, str):
        return dict(token_ids)
    places = tokens.places if isinstance(tokens, PassedArray) else _places(tokens or [])
    found = {text: number for text, number in places.items() if text in template}
    if _CALL in found:
        found.pop(_MESSAGE_END, None)
    known = token_ids.get("eos_token_id", [])
    ends = list(dict.fromkeys([*(known if isinstance(known, list) else [known]), *sorted(found.values())]))
    return {**token_ids, "eos_token_id": ends} if len(ends) > 1 else dict(token_ids)


def _places(tokens: list[Any]) -> dict[str, int]:
    return {text: number for number, text in enumerate(tokens) if text in TURN_ENDS}
