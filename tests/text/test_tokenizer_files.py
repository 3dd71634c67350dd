"""Folders with a tokenizer, and whatever stands around it, against transformers' PreTrainedTokenizerFast."""

import json
import tempfile
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as CoreTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moeflow.core.errors import ChatTemplateError, CheckpointError
from moeflow.text.chat_template_files import choose_template
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import byte_level_core, smollm2_tokenizer
from tests.text.test_tokenizer import needs_smollm2
from tests.tiny_mixtral import write_byte_tokenizer

TEXTS = ("", "the fox", " 你好 🙂\n\n  x", "<|turn|>the<|end|>", "<new> fox<image>the <other>", "<|end|> <pad>  <new>")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")

first, second = itemgetter(0), itemgetter(1)

# In the vocabulary and special, in the vocabulary and plain, in no vocabulary.
contents = st.sampled_from(["<|end|>", "<|turn|>", "t", "the", "<new>", "<other>", "<pad>", "<image>"])
flags = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), st.booleans())
)


@st.composite
def tokens(draw, mark=None):
    """A token as text or, in the forms that files have for it, as an object."""
    content = draw(contents)
    if draw(st.booleans()):
        return content
    return {"content": content} | draw(flags) | ({} if mark is None else mark)


config_tokens = tokens(mark={"__type": "AddedToken"})
tables = st.lists(contents, max_size=4, unique=True).flatmap(
    lambda found: st.fixed_dictionaries(
        {
            str(400 + place): st.builds(
                lambda more, special, content: {"content": content, "special": special} | more,
                flags,
                st.booleans(),
                st.just(content),
            )
            for place, content in enumerate(found)
        }
    )
)
named_tokens = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.none() | config_tokens))


def tokens_by_name(names):
    """Of one kind of name: what transformers saves of both kinds it does not read again as it was."""
    return st.dictionaries(st.sampled_from(names), contents, max_size=2)


configs = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    named_tokens,
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": st.lists(config_tokens, max_size=3),
            "extra_special_tokens": st.lists(config_tokens, max_size=3)
            | st.sampled_from([["video", "audio"], ["video_token", "audio_token"]]).flatmap(tokens_by_name),
            "added_tokens_decoder": tables,
            "add_bos_token": st.booleans(),
            "add_eos_token": st.booleans(),
            "split_special_tokens": st.booleans(),
            "model_max_length": st.integers(1000, 9000),
            "tokenizer_class": st.sampled_from(["LlamaTokenizer", "GPT2TokenizerFast"]),
            "chat_template": st.sampled_from(["", "config"]) | st.just([{"name": "tool", "template": "config tool"}]),
        },
    ),
)
special_tokens_maps = st.none() | st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(NAMES, tokens())
    | {
        "extra_special_tokens": st.lists(tokens(), max_size=2),
        "additional_special_tokens": st.lists(contents, max_size=2),
    },
)
added_tokens = st.none() | st.lists(
    st.tuples(contents, st.integers(0, 500)), max_size=3, unique_by=(first, second)
).map(dict)
template_files = st.dictionaries(
    st.sampled_from(
        ["chat_template.jinja", *(f"additional_chat_templates/{name}.jinja" for name in ("default", "rag"))]
    ),
    st.sampled_from(["", "file", "{{ bos_token }}\r\n{{ image_token }}\r"]),
    max_size=3,
)


@st.composite
def cores(draw):
    """A tokenizer that may begin prompts in some way, cut or pad them."""
    core = CoreTokenizer.from_str(byte_level_core().to_str())
    if draw(st.booleans()):
        core.post_processor = processors.TemplateProcessing(
            single="<|turn|> $A", pair="<|turn|> $A $B", special_tokens=[("<|turn|>", 1)]
        )
    if draw(st.booleans()):
        core.add_tokens([AddedToken("<new>", lstrip=True)])
    if draw(st.booleans()):
        core.enable_truncation(max_length=3)
    if draw(st.booleans()):
        core.enable_padding(length=9, pad_token="<pad>")
    return core


def write_files(folder, core, config, special_map=None, added=None, templates=()):
    core.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config", config), ("special_tokens_map", special_map), ("added_tokens", added)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    for name, text in dict(templates).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())


def by_transformers(folder, load=PreTrainedTokenizerFast):
    tokenizer = load.from_pretrained(folder, local_files_only=True)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def pipeline(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())


def assert_same(ours, theirs):
    assert json.loads(ours._core.to_str()) == pipeline(theirs)
    assert ours._parts.special.texts == theirs.special_tokens_map
    assert [str(token) for token in ours._parts.special.others] == theirs.extra_special_tokens
    assert ours.has_chat_template == bool(theirs.chat_template)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    try:
        expected = theirs.get_chat_template()
    except ValueError:
        expected = ""
    try:
        assert choose_template(ours._parts.chat_templates) == expected
    except ChatTemplateError:
        assert expected == ""


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cores(), st.none() | configs, special_tokens_maps, added_tokens, template_files)
def test_any_folder_gives_what_transformers_gives(core, config, special_map, added, templates):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, core, config, special_map, added, templates)
        ours, theirs = Tokenizer.load(folder), by_transformers(folder)
        assert_same(ours, theirs)
        ours.save(folder / "ours")
        theirs.save_pretrained(folder / "theirs")
        again = by_transformers(folder / "ours", AutoTokenizer)
        assert again.special_tokens_map == theirs.special_tokens_map  # what transformers saves loses some of these
        assert again.extra_special_tokens == theirs.extra_special_tokens
        assert pipeline(again) == pipeline(by_transformers(folder / "theirs", AutoTokenizer))
        assert_same(Tokenizer.load(folder / "ours"), again)


@pytest.mark.parametrize("skips", [True, False])
def test_a_folder_that_transformers_saved(tmp_path, skips):
    write_byte_tokenizer(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), by_transformers(tmp_path)
    assert_same(ours, theirs)
    ids = list(range(ours.vocab_size))
    assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)


@pytest.mark.slow
@needs_smollm2
def test_the_built_in_models_tokenizer_saved(tmp_path):
    smollm2_tokenizer().save(tmp_path)
    theirs = by_transformers(tmp_path, AutoTokenizer)
    assert_same(smollm2_tokenizer(), theirs)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    expected = theirs.apply_chat_template(question, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert smollm2_tokenizer().apply_chat_template(question) == expected
    assert_same(Tokenizer.load(tmp_path), theirs)


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token is 5, not a token"),
        ("tokenizer_config.json", '{"extra_special_tokens": "x"}', "extra_special_tokens is 'x', not a list"),
        ("tokenizer_config.json", '{"extra_special_tokens": [7]}', "extra_special_tokens is 7, not a token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": "x"}}', "'x' in added_tokens_decoder is no token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "invalid literal"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "cannot be used"),
        ("tokenizer_config.json", '{"split_special_tokens": "x"}', "cannot be used"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: holds a JSON list"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json: holds no chat template"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "a"}]}',
            "tokenizer_config.json: holds no chat template",
        ),
        (
            "tokenizer_config.json",
            '{"fast_tokenizer_files": ["tokenizer.json", "tokenizer.9.json"]}',
            "several tokenizers",
        ),
        ("special_tokens_map.json", "{", "special_tokens_map.json: does not hold valid JSON"),
        ("special_tokens_map.json", '{"extra_special_tokens": 5}', "cannot be used"),
        ("added_tokens.json", '{"a": "x"}', "invalid literal"),
        ("chat_template.json", "{}", "chat_template.json: holds no chat template"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    assert message in refused(tmp_path)


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    write_files(tmp_path, byte_level_core(), {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja: holds no chat template" in refused(tmp_path)


def test_several_templates_without_a_default_cannot_be_used(tmp_path):
    write_files(tmp_path, byte_level_core(), {"chat_template": [{"name": "rag", "template": "x"}]})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"\['rag'\] is the default"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_templates_name_leads_out_of_no_folder(tmp_path):
    write_files(tmp_path, byte_level_core(), {"chat_template": {"default": "x", "../../y": "z"}})
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./y', which can be no file's"):
        Tokenizer.load(tmp_path).save(tmp_path / "a" / "b")
    assert not (tmp_path / "y.jinja").exists()


def test_saving_leaves_out_what_is_of_this_machine_or_of_code(tmp_path):
    config = {
        "auto_map": {"AutoTokenizer": ["x.Y", None]},
        "name_or_path": "/home/me",
        "legacy": False,
        "pad_token": None,
    }
    write_files(tmp_path, byte_level_core(), config)
    Tokenizer.load(tmp_path).save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved == {"legacy": False, "pad_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
