"""The hint for an unknown name: the nearest spelling, another program's name for it, or none at all."""

import pytest

from moeflow.core.near_names import did_you_mean, near_name

ALIKE = (("max_tokens", "max_output_tokens", "num_predict"), ("stop", "stop_sequences"))


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("serf", ["serve", "chat"], "serve"),
        ("num_predict", ["prediction", "max_output_tokens"], "max_output_tokens"),
        ("num_predict", ["max_output_tokens", "max_tokens"], "max_tokens"),
        ("stop", ["top_p"], "top_p"),
        ("stop_sequences", ["sequences", "stop"], "stop"),
        ("foo", ["tools"], None),
        ("x" * 10**6, ["tools"], None),
        ("x", [], None),
    ],
)
def test_near_names(name, known, meant):
    assert near_name(name, known, ALIKE) == meant
    expected = "leave it out" if meant is None else f"did you mean {meant!r}?"
    assert did_you_mean(name, known, "leave it out", ALIKE) == expected


def test_spellings_of_less_likeness_are_not_near():
    assert near_name("stop", ["top_p"], likeness=0.75) is None
    assert near_name("txet", ["text"], likeness=0.75) == "text"
