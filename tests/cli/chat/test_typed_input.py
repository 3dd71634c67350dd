import builtins
import os
import stat
import sys

import pytest

from moeflow.cli.chat.typed_input import MAX_REMEMBERED, InputHistory, read_input
from tests.cli.terminal import terminal


@pytest.fixture
def typed(monkeypatch):
    def install(*lines: str | type[BaseException]) -> None:
        keys = iter(lines)

        def read(prompt: str) -> str:
            key = next(keys)
            if isinstance(key, str):
                return key
            raise key

        monkeypatch.setattr(builtins, "input", read)

    return install


@pytest.mark.parametrize(
    ("lines", "meant"),
    [
        (["  one "], "one"),
        (["one \\", "  two\\", "three"], "one \n  two\nthree"),
        (['"""one', "", '  two"""'], "one\n\n  two"),
        (['"""', "one\\", "/two", '"""'], "one\\\n/two"),
        (['"""one"""'], "one"),
        (['"""', '"""'], ""),
        (["pasted\nlines"], "pasted\nlines"),
    ],
)
def test_lines_that_belong_together_are_one_input(typed, lines, meant):
    typed(*lines)
    assert read_input() == meant


def test_ctrl_c_forgets_what_was_begun_and_leaves_at_the_prompt(typed):
    typed("one \\", KeyboardInterrupt, "two", KeyboardInterrupt)
    assert read_input() == "two"
    with pytest.raises(KeyboardInterrupt):
        read_input()


PROGRAM = """
import sys
from pathlib import Path
from moeflow.cli.chat.typed_input import InputHistory, read_input
history = InputHistory(Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    text = read_input()
    history.add(text)
    print("read", repr(text))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return lambda count: terminal(sys.executable, "-c", PROGRAM, str(tmp_path / "cache" / "history"), str(count))


def test_earlier_inputs_are_there_in_the_next_session(program, tmp_path):
    pytest.importorskip("readline")
    with program(2) as session:
        session.expect("> ")
        session.type(b"one \\\ntwo\n")
        session.expect(r"read 'one \ntwo'")
        session.type(b"three\n")
        session.expect("read 'three'")
    file = tmp_path / "cache" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    up = b"\x1b[A"
    with program(2) as session:
        session.expect("> ")
        session.type(up + b"\n")
        session.expect("read 'three'")
        session.type(up + up + b"\n")
        session.expect(r"read 'one \ntwo'")


def test_what_is_pasted_is_one_input(program):
    pytest.importorskip("readline")
    with program(1) as session:
        session.expect("> ")
        session.type(b"\x1b[200~one\ntwo\x1b[201~\n")
        session.expect(r"read 'one\ntwo'")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "history"


def test_the_file_does_not_grow_for_ever(file):
    history = InputHistory(file)
    for number in range(2 * MAX_REMEMBERED + 1):
        history.add(str(number))
        history.add(str(number))
    lines = file.read_text().splitlines()
    assert (len(lines), lines[-1]) == (MAX_REMEMBERED, f'"{2 * MAX_REMEMBERED}"')


def test_a_damaged_line_of_the_history_is_left_out(file):
    readline = pytest.importorskip("readline")
    file.write_bytes(b'"one"\n"tw\xff\n"three"\n')
    InputHistory(file).add("four")
    assert [readline.get_history_item(number) for number in (1, 2, 3)] == ["one", "three", "four"]
    assert file.read_bytes().endswith(b'\n"three"\n"four"\n')


def test_nor_is_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    InputHistory(tmp_path / "file" / "history").add("one")
    assert os.listdir(tmp_path) == ["file"]
