from typing import ClassVar

import pytest

from moeflow.cli.chat.chat_backend import Messages
from moeflow.cli.chat.commands import HELP, SETTABLE, Commands, Leave, Retry
from moeflow.cli.chat.conversation import ChatHistory
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams


class Counter:
    """Counts a token a letter, and ten for each message of a conversation."""

    max_model_len = 200
    name = "small"
    sampling_defaults: ClassVar = {"temperature": 0.5, "top_k": 7, "top_p": 1.0, "min_p": 0.0}

    def model_names(self) -> list[str]:
        return ["small", "large"]

    def use(self, name: str) -> None:
        if name not in self.model_names():
            raise RequestError(f"no {name}")
        self.name = name

    def count_tokens(self, said: str | Messages) -> int:
        return len(said) if isinstance(said, str) else sum(len(it["content"]) + 10 for it in said)


@pytest.fixture
def conversation():
    return ChatHistory(SamplingParams(temperature=0.0))


@pytest.fixture
def commands(conversation):
    return Commands(conversation, Counter())


def test_reset_forgets_turns_but_keeps_the_system_prompt(commands, conversation):
    conversation.system = "Be brief."
    conversation.add("one?", "1")
    commands.run("/reset")
    assert [message["role"] for message in conversation.messages("x")] == ["system", "user"]


def test_system_replaces_the_prompt_and_forgets(commands, conversation):
    conversation.add("one?", "1")
    commands.run("/system Answer in French.")
    assert conversation.messages("x")[0] == {"role": "system", "content": "Answer in French."}
    assert len(conversation.messages("x")) == 2
    commands.run("/system")
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
def test_set_changes_sampling(commands, conversation, line, name, value):
    assert commands.run(line) == f"{name} is {value}"
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
def test_a_wrong_command_changes_nothing_and_says_why(commands, conversation, line, complaint):
    before = conversation.sampling
    assert complaint in commands.run(line)
    assert conversation.sampling == before


def test_set_alone_shows_every_setting(commands, conversation):
    shown = commands.run("/set")
    assert [line.split()[0] for line in shown.splitlines()] == list(SETTABLE)


def test_set_alone_shows_which_values_are_the_models(commands):
    commands.run("/set top_p 0.75")
    shown = dict(line.split(maxsplit=1) for line in commands.run("/set").splitlines())
    assert shown["temperature"] == "0.0"  # as the chat was started
    assert (shown["top_k"], shown["top_p"]) == ("7 (the model's default)", "0.75")
    assert shown["repetition_penalty"] == "the model's default"  # which the backend does not know
    commands.run("/set temperature none")
    assert "0.5 (the model's default)" in commands.run("/set")


def test_help_and_exit(commands, conversation):
    assert commands.run("/help") == HELP
    with pytest.raises(Leave):
        commands.run("/exit")


def test_help_names_every_command(commands):
    known = commands.run("/dance").partition("there are ")[2].split(", ")
    others = ["/retry", "/reset", "/save", "/load", "/context", "/model", "/system", "/set", "/exit"]
    assert known == ["/help", *others]
    assert all(f"\n{name} " in f"\n{HELP}" for name in known)


def test_retry_is_the_last_question(commands, conversation):
    assert commands.run("/retry") == "nothing was asked yet"
    conversation.add("one?", "1")
    conversation.add("two?", "2")
    assert commands.run("/retry") == Retry("two?")


@pytest.mark.parametrize("name", ["talk.md", "talk.json", "my talk.MD"])
def test_what_is_saved_is_loaded(commands, conversation, tmp_path, name):
    conversation.system = "Be brief."
    conversation.add("one?", "1\n\n<!-- moeflow: user -->\n")
    turns = list(conversation.turns)
    assert commands.run(f"/save {tmp_path / name}") == f"saved in {tmp_path / name}"
    conversation.add("two?", "2")
    assert commands.run(f"/load {tmp_path / name}") == "questions and answers: 1; the last question was: one?"
    assert (conversation.system, conversation.turns) == ("Be brief.", turns)


@pytest.mark.parametrize("name", ["talk.md", "talk.json"])
def test_a_conversation_of_another_model_says_so(commands, conversation, tmp_path, name):
    conversation.add("one?", "1")
    commands.run("/model large")
    commands.run(f"/save {tmp_path / name}")
    loaded = "questions and answers: 1; the last question was: one?"
    assert commands.run(f"/load {tmp_path / name}") == loaded
    commands.run("/model small")
    held = "\nit was held with large; now small answers"
    assert commands.run(f"/load {tmp_path / name}") == f"{loaded}{held}; /model large goes back to it"
    gone = (tmp_path / name).read_text().replace("large", "gone")
    (tmp_path / name).write_text(gone)
    assert commands.run(f"/load {tmp_path / name}") == f"{loaded}{held}".replace("large", "gone")


def test_files_that_cannot_be_used_change_nothing(commands, conversation, tmp_path):
    assert commands.run("/save x.md") == "nothing was said yet"
    conversation.add("one?", "1")
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "cut.json").write_text('{"format": ')
    assert "exists and is no conversation" in commands.run(f"/save {tmp_path / 'notes.md'}")
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert "must end in .md" in commands.run(f"/save {tmp_path / 'talk.txt'}")
    assert "No such file" in commands.run(f"/save {tmp_path / 'nowhere' / 'talk.md'}")
    assert "No such file" in commands.run(f"/load {tmp_path / 'talk.md'}")
    assert "it is not JSON; it may be cut off" in commands.run(f"/load {tmp_path / 'cut.json'}")
    assert "name a file" in commands.run("/save")
    assert "name a file" in commands.run("/load")
    assert [it["content"] for it in conversation.turns] == ["one?", "1"]


def test_context_says_what_takes_it(commands, conversation):
    conversation.system = "four"
    conversation.add("sevenis", "twelve" * 2)
    lines = commands.run("/context").splitlines()
    counts = [int(line.split(" tokens")[0].split()[-1]) for line in lines]
    assert counts == [4, 7, 12, 40, 63, 200]
    assert lines[3].startswith("chat template ")
    assert lines[-1].endswith("32% are taken")


def test_another_model_answers(commands):
    assert commands.run("/model") == "* small\n  large"
    assert commands.run("/model large") == "large answers from now on"
    assert commands.run("/model") == "  small\n* large"
    assert commands.run("/model huge") == "no huge"
    assert commands.run("/model") == "  small\n* large"
