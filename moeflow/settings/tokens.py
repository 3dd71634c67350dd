"""Settings of how tokens are found: speculators that draft them, and defaults of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeflow.settings.option import setting

GENERATION_CONFIGS: Final = ("auto", "none")


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """Drafts and sampling."""

    speculators: tuple[str, ...] = setting(
        "--speculator",
        "texts",
        "Drafts the next tokens, and the model verifies them in one pass, as far as that is faster. Answers "
        "stay the same. auto: suffix, and speculators from `moeflow train speculator` for this model. suffix: "
        "from the prompt and earlier answers. PATH[:FORMAT]: a small model with the same tokenizer, in its "
        "own integers or int8 unless another format is given. dense-source: the source of the built-in model. "
        "self:int8: the model itself, quantized. early-exit[:LAYERS]: its first layers, if it was trained "
        "for that. May be given several times.",
        group="Speculation",
        default=(),
        shown_default="none",
    )
    generation_config: str = setting(
        "--generation-config",
        "choice",
        "Sampling defaults of requests. auto: those of the model's generation_config.json or GGUF metadata; none: "
        "temperature 1 and nothing else.",
        group="Sampling",
        default="auto",
        choices=GENERATION_CONFIGS,
    )
