"""The models that an engine runs; each is a function of token ids and a context, see their `__call__`."""

from __future__ import annotations

from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM

LanguageModel = CausalLM | EncoderDecoderLM
