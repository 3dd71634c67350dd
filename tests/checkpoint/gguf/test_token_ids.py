"""Tokens that end a turn: GGUF files declare one, `generation_config.json` of the same models lists all."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.gguf import header
from moeflow.checkpoint.gguf.token_ids import TOKENS, TURN_ENDS
from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.plausibility import read_eos_token_ids
from tests.checkpoint.tiny_models import HIDDEN, VOCAB, finish, gguf_writer

PLAIN = [f"t{number}" for number in range(VOCAB)]


def written(file, texts, template, *, num_more=0, **ids):
    """Write a model with tokens from number 3 on; token 2 ends a text. `num_more` make the vocabulary long."""
    writer = gguf_writer(file, "llama")
    for kind, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", number)
    tokens = [*PLAIN[:3], *texts, *PLAIN[3 + len(texts) :], *(f"more{number}" for number in range(num_more))]
    del writer.kv_data[0][TOKENS]
    writer.add_token_list(tokens)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    finish(writer)
    return file


def ends(file):
    checkpoint = open_checkpoint(file)
    try:
        return read_eos_token_ids(checkpoint)
    finally:
        checkpoint.close()


@pytest.mark.parametrize("num_more", [0, 5000], ids=["short vocabulary", "long vocabulary"])
@pytest.mark.parametrize(
    ("texts", "template", "expected"),
    [
        (["<end_of_turn>"], "<start_of_turn>{{ m }}<end_of_turn>", (2, 3)),  # Gemma 3
        (["<|end|>", "<|assistant|>"], "<|user|>{{ m }}<|end|>", (2, 3)),  # Phi-3.5-MoE
        (["<|call|>", "<|return|>", "<|end|>"], "<|call|><|return|><|end|>", (2, 3, 4)),  # gpt-oss
        (["<turn|>", "<|tool_response>"], "<turn|>{{ m }}<|tool_response>", (2, 3, 4)),  # Gemma 4
        (["<|eot_id|>", "<|eom_id|>"], "{{ m }}<|eot_id|>{% if x %}<|eom_id|>{% endif %}", (2, 3, 4)),  # Llama 3.1
        (["<|im_end|>"], "{{ m }}", (2,)),  # a base model, with ChatML's tokens in its vocabulary
        (["<|im_end|>"], None, (2,)),
        (["x"], "{{ m }}<|im_end|>", (2,)),  # which the template spells out
    ],
)
def test_ends_are_those_that_the_chat_template_has(tmp_path, texts, template, expected, num_more):
    file = written(tmp_path / "model.gguf", texts, template, num_more=num_more)
    assert ends(file) == expected


def test_ends_that_the_file_declares_come_first_and_once(tmp_path):
    texts = ["<|im_end|>", "<|eot_id|>"]
    file = written(tmp_path / "model.gguf", texts, "{{ m }}<|im_end|><|eot_id|>", eot=4, eom=7)
    assert ends(file) == (2, 4, 7, 3)


def test_the_configs_key_stays_so_packed_files_fit(tmp_path):
    file = written(tmp_path / "model.gguf", ["<end_of_turn>"], "{{ m }}<end_of_turn>")
    assert open_checkpoint(file).config["eos_token_id"] == 2


@given(st.lists(st.sampled_from(sorted(TURN_ENDS)) | st.text(max_size=9), max_size=30, unique=True), st.integers(1, 40))
def test_places_are_the_same_however_pieces_end(tmp_path_factory, strings, piece_bytes):
    content = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in strings)
    file = tmp_path_factory.getbasetemp() / "places"
    file.write_bytes(content)
    with file.open("rb") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_PIECE_BYTES", piece_bytes)
        _, places = header._Cursor(stream, file).pass_strings(len(strings), TURN_ENDS)
    assert places == {text: number for number, text in enumerate(strings) if text in TURN_ENDS}


def test_nothing_is_sought_in_other_arrays(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("other", ["<|im_end|>"] * 5000)
    finish(writer)
    sought = {TOKENS: TURN_ENDS}
    metadata = header.read_gguf_header(tmp_path / "model.gguf", with_vocabulary=False, sought=sought).metadata
    assert metadata["other"].places == {}
