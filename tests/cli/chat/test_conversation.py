import pytest

from moeflow.cli.chat.conversation import ChatHistory
from moeflow.core.sampling_params import SamplingParams


@pytest.fixture
def conversation():
    return ChatHistory(SamplingParams(temperature=0.0))


def test_the_model_sees_system_prompt_past_turns_and_the_question(conversation):
    conversation.system = "Be brief."
    conversation.add("one?", "1")
    assert conversation.messages("two?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    ]


def test_without_a_system_prompt_there_is_no_system_message(conversation):
    assert conversation.messages("hello") == [{"role": "user", "content": "hello"}]


def test_a_question_that_is_asked_again_takes_the_place_of_the_last(conversation):
    conversation.add("one?", "1")
    conversation.add("two?", "3")
    assert [it["content"] for it in conversation.messages("two?", again=True)] == ["one?", "1", "two?"]
    assert conversation.turns[-1]["content"] == "3", "it stays until there is another"
    conversation.add("two?", "2", again=True)
    assert [it["content"] for it in conversation.turns] == ["one?", "1", "two?", "2"]
