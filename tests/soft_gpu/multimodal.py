"""Writes a tiny model that also takes images and sounds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from studies.small_families import write_small
from tests.models.test_gemma4 import IMAGES, SOUNDS


def write_multimodal(folder: Path, initializer_range: float) -> None:
    """Write Gemma 4 with encoders of images and sounds beside its text model."""
    write_small("gemma4_text", folder, initializer_range=initializer_range)
    text = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=IMAGES, audio_config=SOUNDS))
    model.to(torch.bfloat16).save_pretrained(folder)
