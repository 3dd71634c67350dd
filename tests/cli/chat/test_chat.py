import os
import signal
import sys
from collections.abc import Iterator

import pytest

from moeflow.cli.chat.chat import answer, converse, speed, stoppable
from moeflow.cli.chat.chat_backend import AnswerPiece, Messages
from moeflow.cli.chat.conversation import ChatHistory
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams
from tests.cli.terminal import terminal


class EchoTalker:
    """Answers with the question's words, and keeps all questions."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[Messages] = []
        self.is_stopped = False

    def answer(self, messages: Messages, sampling: SamplingParams) -> Iterator[AnswerPiece]:
        self.asked.append(messages)
        if "refuse" in messages[-1]["content"]:
            raise RequestError("the prompt is too long")
        try:
            for word in messages[-1]["content"].split():
                yield AnswerPiece(word + " ", 1)
        finally:
            self.is_stopped = True

    def close(self) -> None: ...


@pytest.fixture
def conversation():
    return ChatHistory(SamplingParams())


@pytest.fixture
def typed(monkeypatch):
    """Prepare what the user types; an exception stands for a key."""

    def install(*lines: str | type[BaseException], at_terminal: bool = True) -> None:
        keys = iter([*lines, EOFError])

        def read(prompt: str = "") -> str:
            key = next(keys)
            if isinstance(key, str):
                return key
            raise key

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: at_terminal, raising=False)

    return install


def test_questions_are_answered_with_what_was_said_before(typed, conversation, capsys):
    typed("one two", "three", at_terminal=False)
    backend = EchoTalker()
    converse(backend, conversation)
    assert capsys.readouterr().out == "one two \nthree \n"
    assert [message["content"] for message in backend.asked[1]] == ["one two", "one two ", "three"]


def test_a_terminal_gets_greeting_commands_and_speed(typed, conversation, capsys):
    typed("one two three", "/reset", "", "/exit", "never asked")
    backend = EchoTalker()
    converse(backend, conversation)
    out = capsys.readouterr().out
    assert out.startswith("echo. Ctrl-C while an answer comes stops it. /help for more.\none two three \n[3 tokens")
    assert "forgotten\n" in out
    assert len(backend.asked) == 1


def test_a_question_is_answered_again(typed, conversation, capsys):
    typed("one", "two three", "/retry", "/retry", "four")
    backend = EchoTalker()
    converse(backend, conversation)
    assert [it["content"] for it in backend.asked[3]] == ["one", "one ", "two three"]
    assert [it["content"] for it in backend.asked[4]] == ["one", "one ", "two three", "two three ", "four"]


def test_a_pasted_text_that_begins_with_a_slash_is_a_question(typed, conversation):
    typed("/reset\nsays the manual")
    backend = EchoTalker()
    converse(backend, conversation)
    assert backend.asked[0][0]["content"] == "/reset\nsays the manual"


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_ctrl_c_or_ctrl_d_at_the_prompt_leaves(typed, conversation, key):
    typed("one", key, "never asked")
    backend = EchoTalker()
    converse(backend, conversation)
    assert len(backend.asked) == 1


def test_a_slash_is_text_when_no_terminal_types_it(typed, conversation, capsys):
    typed("/exit", at_terminal=False)
    converse(EchoTalker(), conversation)
    assert capsys.readouterr().out == "/exit \n"


def test_a_refused_question_is_told_and_forgotten(typed, conversation, capsys):
    typed("refuse this", "again")
    backend = EchoTalker()
    converse(backend, conversation)
    assert "error: the prompt is too long" in capsys.readouterr().err
    assert backend.asked[1] == [{"role": "user", "content": "again"}]


def test_a_refused_question_from_a_pipe_ends_with_the_error(typed, conversation):
    typed("refuse this", at_terminal=False)
    with pytest.raises(RequestError):
        converse(EchoTalker(), conversation)


def test_ctrl_c_stops_the_answer_and_keeps_what_came(conversation, capsys):
    class Interrupted(EchoTalker):
        def answer(self, messages: Messages, sampling: SamplingParams) -> Iterator[AnswerPiece]:
            for number, piece in enumerate(super().answer(messages, sampling)):
                if number == 1:
                    signal.raise_signal(signal.SIGINT)
                yield piece

    backend = Interrupted()
    before = signal.getsignal(signal.SIGINT)
    answer(backend, conversation, "one two three", show_speed=False)
    assert capsys.readouterr().out == "one two \n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "one two "}
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait():
    with stoppable() as is_stopped:
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_first_tokens_time_is_not_part_of_the_rate():
    assert speed(11, 3.0, 2.0) == "[11 tokens, 5.0 tokens/s, first after 3.00 s]"
    assert speed(1, 0.25, 0.0) == "[1 tokens, first after 0.25 s]"


PROGRAM = """
import sys
from moeflow.cli.chat.chat import converse
from moeflow.cli.chat.conversation import ChatHistory
from moeflow.core.sampling_params import SamplingParams
sys.path.insert(0, {folder!r})
from test_chat import EchoTalker
converse(EchoTalker(), ChatHistory(SamplingParams()))
"""


def test_a_real_terminal_session():
    program = PROGRAM.format(folder=os.path.dirname(__file__))
    with terminal(sys.executable, "-c", program) as session:
        session.expect("> ")
        session.type(b"hello there\n")
        assert "hello there \r\n" in session.expect("first after")
        session.expect("> ")
        session.type(b"\x04")
        assert session.process.wait(timeout=60) == 0
