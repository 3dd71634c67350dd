from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.speculation.names import short_names


def test_models_are_called_by_the_ends_of_their_paths():
    found = short_names(("suffix", "/home/me/models/small.Q4_1.gguf", "self:int8"))
    assert list(found.values()) == ["suffix", "small.Q4_1", "self:int8"]


def test_parts_of_a_model_are_called_as_the_whole():
    found = short_names(("suffix", "/home/me/small-00001-of-00004.gguf:int8"))
    assert list(found.values()) == ["suffix", "small:int8"]


def test_a_number_alone_is_no_name():
    found = short_names(("suffix", "/home/me/model/speculators/1"))
    assert list(found.values()) == ["suffix", "speculators/1"]


def test_as_much_of_the_paths_as_tells_them_apart():
    found = short_names(("/a/x/model:int8", "/b/x/model:int8", "suffix"))
    assert list(found.values()) == ["a/x/model:int8", "b/x/model:int8", "suffix"]


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


@given(st.lists(names, unique=True, max_size=5))
def test_no_two_are_called_alike(paths):
    found = short_names(paths)
    assert list(found) == paths
    assert len(set(found.values())) == len(paths)
