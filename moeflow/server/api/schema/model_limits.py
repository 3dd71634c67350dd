"""Bounds of fields that depend on the model and the settings it is served with: token ids, sequences of one request.

Requests are checked against them where they are used (`engine/admission.py`, `guard/admission.py`). Here fields are
marked with the bound that they have, so that the OpenAPI document of a server that has loaded its model names it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from moeflow.core.engine_messages import ModelInfo
from moeflow.core.sampling_params import MAX_N

_MARK = "x-model-limit"
TokenId = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={_MARK: "token id"})]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    # pydantic names the pattern, but not that it must match everything
    Field(json_schema_extra={"additionalProperties": False, _MARK: "token ids as keys"}),
]
NumSequences = Annotated[int, Field(ge=1, le=MAX_N, json_schema_extra={_MARK: "sequences"})]
NumDimensions = Annotated[int, Field(ge=1, json_schema_extra={_MARK: "numbers of a vector"})]
TokenTreesWish = Annotated[bool, Field(json_schema_extra={_MARK: "token trees"})]
PROMPTS: dict[str, Any] = {_MARK: "prompts"}  # for the `json_schema_extra` of a list of prompts


def state_limits(document: Any, model: ModelInfo | None, max_queue: int) -> Any:
    """Return the document with marks replaced by what this model and queue allow; without a model, just removed."""
    if isinstance(document, list):
        return [state_limits(item, model, max_queue) for item in document]
    if not isinstance(document, dict):
        return document
    stated = {name: state_limits(value, model, max_queue) for name, value in document.items() if name != _MARK}
    if model is None or _MARK not in document:
        return stated
    return stated | _limit(document[_MARK], stated, model, model.max_num_seqs + max_queue)


def _limit(mark: str, schema: dict[str, Any], model: ModelInfo, max_sequences: int) -> dict[str, Any]:
    match mark:
        case "token id":
            return {"exclusiveMaximum": model.vocab_size}
        case "token ids as keys":
            (bias,) = schema["patternProperties"].values()
            return {"patternProperties": {pattern_below(model.vocab_size): bias}}
        case "sequences":
            return {"maximum": min(MAX_N, max_sequences)}
        case "numbers of a vector":
            return {"maximum": model.hidden_size}
        case "token trees":
            return {} if model.speculators else {"const": False}
        case _:
            return {"maxItems": max_sequences}


def pattern_below(limit: int) -> str:
    """Return a regular expression for the integers from 0 to limit - 1, without leading zeros."""
    largest = str(limit - 1)
    choices = [largest]
    for place, digit in enumerate(largest):  # the first place at which a number of as many digits is smaller
        least = 0 if place or len(largest) == 1 else 1
        if int(digit) > least:
            rest = len(largest) - place - 1
            choices.append(f"{largest[:place]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    if len(largest) > 1:
        choices += ["0", f"[1-9][0-9]{{0,{len(largest) - 2}}}"]
    return f"^({'|'.join(choices)})$"
