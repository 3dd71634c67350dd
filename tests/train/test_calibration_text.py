import pytest

from moeflow.core.errors import ConfigError
from moeflow.train.calibration_text import CALIBRATION_FOLDER, MAX_FITTING_TOKENS, calibration_text


def encode(text):
    return [ord(character) for character in text]


def test_the_packages_own_text_has_domains_and_sources():
    text = calibration_text(encode)
    files = sorted(CALIBRATION_FOLDER.glob("*.txt"))
    assert len(text.fitting) == len(text.held_out) == len(files) >= 6
    sources = (CALIBRATION_FOLDER / "SOURCES.md").read_text()
    assert all(f"`{file.name}`" in sources for file in files)
    assert 40_000 <= sum(file.stat().st_size for file in files) <= 60_000


def test_held_out_text_of_the_tests_is_not_calibrated_on(request):
    calibration = "\n".join(file.read_text() for file in CALIBRATION_FOLDER.glob("*.txt"))
    for file in (request.config.rootpath / "tests" / "data").glob("heldout_*.txt"):
        assert not any(line in calibration for line in file.read_text().split(". ") if len(line) > 30)


def test_the_last_tenth_is_held_out(tmp_path):
    (tmp_path / "mine.txt").write_text("0123456789" * 10)
    text = calibration_text(encode, tmp_path / "mine.txt")
    assert text.fitting == [encode("0123456789" * 9)]
    assert text.held_out == [encode("0123456789")]


def test_long_text_is_cut(tmp_path):
    (tmp_path / "mine.txt").write_text("é" * 300_000)
    text = calibration_text(encode, tmp_path / "mine.txt")
    assert len(text.fitting[0]) + len(text.held_out[0]) == MAX_FITTING_TOKENS
    assert set(text.fitting[0]) == {ord("é")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"too short", "at least 40"),
        (b"x" * 50 + b"\xff\xfe" + b"x" * 50, "not UTF-8"),
        (b"x" * 50 + b"\xc3", "not UTF-8"),
    ],
)
def test_unusable_text_is_a_clear_error(tmp_path, content, message):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        calibration_text(encode, tmp_path / "mine.txt")


def test_a_character_cut_in_two_by_the_limit_is_left_out(tmp_path):
    (tmp_path / "mine.txt").write_text("x" + "é" * 200_000)  # two bytes each, so the limit falls inside one
    assert calibration_text(encode, tmp_path / "mine.txt").fitting[0][0] == ord("x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt"):
        calibration_text(encode, tmp_path / "nowhere.txt")
