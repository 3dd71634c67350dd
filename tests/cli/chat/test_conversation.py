import pytest

from moeflow.cli.chat.conversation import HELP, SETTABLE, Conversation, Leave
from moeflow.core.sampling_params import SamplingParams


@pytest.fixture
def conversation():
    return Conversation(SamplingParams(temperature=0.0))


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


def test_reset_forgets_turns_but_keeps_the_system_prompt(conversation):
    conversation.system = "Be brief."
    conversation.add("one?", "1")
    conversation.command("/reset")
    assert [message["role"] for message in conversation.messages("x")] == ["system", "user"]


def test_system_replaces_the_prompt_and_forgets(conversation):
    conversation.add("one?", "1")
    conversation.command("/system Answer in French.")
    assert conversation.messages("x")[0] == {"role": "system", "content": "Answer in French."}
    assert len(conversation.messages("x")) == 2
    conversation.command("/system")
    assert len(conversation.messages("x")) == 1


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set temperature=0.7", "temperature", 0.7),
        ("/set top_k 5", "top_k", 5),
        ("/set seed 3", "seed", 3),
        ("/set seed none", "seed", None),
    ],
)
def test_set_changes_sampling(conversation, line, name, value):
    assert conversation.command(line) == f"{name} is {value}"
    assert getattr(conversation.sampling, name) == value


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set top_p 7", "top_p must be a number from 0 to 1"),
        ("/set top_k many", "must be a number, not 'many'"),
        ("/set n 2", "no setting 'n'"),
        ("/dance", "no such command /dance; there are /help"),
    ],
)
def test_a_wrong_command_changes_nothing_and_says_why(conversation, line, complaint):
    before = conversation.sampling
    assert complaint in conversation.command(line)
    assert conversation.sampling == before


def test_set_alone_shows_every_setting(conversation):
    shown = conversation.command("/set")
    assert [line.split()[0] for line in shown.splitlines()] == list(SETTABLE)


def test_help_and_exit(conversation):
    assert conversation.command("/help") == HELP
    with pytest.raises(Leave):
        conversation.command("/exit")
