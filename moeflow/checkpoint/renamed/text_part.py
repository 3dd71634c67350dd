"""The text model in files of a multimodal one: the names of its tensors without the rest."""

from __future__ import annotations

import re
from typing import Final

# Of files that transformers wrote before its version 5, and since.
_TEXT: Final = re.compile(r"(language_model\.model|model\.language_model)\.")
_HEAD: Final = "language_model.lm_head.weight"
_OF_OTHERS: Final = re.compile(
    r"(model\.)?(visual|vision_tower|vision_embedder|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+"
)


def text_name(name: str) -> str | None:
    """Return what a tensor is called in files of text models; None: it is no part of the text model."""
    if _OF_OTHERS.fullmatch(name):
        return None
    return "lm_head.weight" if name == _HEAD else _TEXT.sub("model.", name, count=1)
