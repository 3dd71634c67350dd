"""What names mean, and that none leads out of the folders that its parts are put into."""

import os.path
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeflow.checkpoint.hub.cache_layout import repository_folder
from moeflow.checkpoint.hub.model_name import ModelName, parse_model_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", ModelName("Qwen/Qwen3-30B-A3B")),
        ("a/b@refs/pr/7", ModelName("a/b", "refs/pr/7")),
        ("a/b-GGUF:Q4_K_M", ModelName("a/b-GGUF", file="Q4_K_M")),
        ("a/b@v1:UD/x-Q4_K_M.gguf", ModelName("a/b", "v1", "UD/x-Q4_K_M.gguf")),
        ("hf.co/a/b:Q8_0", ModelName("a/b", file="Q8_0")),
        ("https://huggingface.co/a/b", ModelName("a/b")),
    ],
)
def test_a_name_is_read(text, name):
    assert parse_model_name(text) == name
    assert parse_model_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "./a",
        "~/a",
        "/a/b",
        "a/b/c",
        "../a",
        "a/..",
        "a--b/c",
        "a/b@../x",
        "a/b:../x",
        "a/b@",
        "a/b:",
        "a/" + 99 * "x",
        "a b/c",
        "a/b\n",
        "ä/b",
        "C:\\models",
        "models/",
        "a/.b",
        "a/b-",
        "https://github.com/foo",
    ],
)
def test_what_is_no_name_is_a_path(text):
    assert parse_model_name(text) is None


@given(st.text(alphabet="ab./-_:@\\\0\n~", max_size=20) | st.from_regex(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w./-]+)?"))
@example("a/b@a/../../../x")
@example("a/b@refs//x")
def test_no_name_leads_out_of_its_folder(text):
    name = parse_model_name(text)
    if name is not None:
        folder = str(repository_folder(name.repo, Path("/cache")))
        assert os.path.dirname(folder) == "/cache"
        for inner in (name.revision, name.file or "x"):
            assert os.path.normpath(f"{folder}/refs/{inner}").startswith(f"{folder}/refs/")
