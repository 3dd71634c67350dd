"""Texts of tasks: of the right length, of their package, none in two files."""

import random

from studies import text_tasks


def test_texts_are_cut_and_shared_out(tmp_path, monkeypatch):
    files = {}
    for package in ("numpy", "scipy"):
        files[package] = [tmp_path / package / f"m{number}.py" for number in range(40)]
        (tmp_path / package).mkdir()
        for number, file in enumerate(files[package]):
            words = " ".join(f"{package[0]}{number}word{place}" for place in range(400))
            file.write_text(f'"""{package} {words}\n\n>>> 1\n"""\n')
    (tmp_path / "scipy" / "m0.py").write_text("not Python")
    monkeypatch.setattr(text_tasks, "PACKAGES", tuple(files))
    monkeypatch.setattr(text_tasks, "modules", files.__getitem__)
    text_tasks.main(tmp_path / "out")
    for task, (shortest, longest) in {"middle": (40, 70), "long": (170, 280)}.items():
        seen = set()
        for part in text_tasks.PARTS:
            lines = (tmp_path / "out" / task / f"{part}.tsv").read_text().splitlines()
            texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
            assert labels.count("numpy") == labels.count("scipy") > 0
            assert all(shortest <= len(text.split()) <= longest for text in texts)
            assert not any("numpy" in text or ">>>" in text for text in texts)
            assert not seen & set(texts)
            seen |= set(texts)
        assert len(seen) > 10


SENTENCES = [
    "The first sentence of the module tells how rows of a matrix are summed.",
    "Then the second sentence tells how rows of a matrix are sorted in place.",
    "Nothing else here has much to do with either of those two above it.",
    "Short one.",
]
WORDS = " ".join(SENTENCES).split()


def test_pairs_say_a_sentence_again_or_the_most_similar_other_one():
    first, second, third = (sentence.split() for sentence in SENTENCES[:3])
    found = list(text_tasks.pairs("numpy", WORDS, random.Random(1)))
    assert [label for label, _ in found] == ["same", "other"] * 3
    sources = [(first, first), (first, second), (second, second), (second, first), (third, third)]
    for (_, text), (sentence, source) in zip(found, sources, strict=False):
        one, again = (part.split() for part in text.split(text_tasks.BETWEEN))
        assert one == sentence
        assert {*again} <= {*source}
        assert len(source) // 2 < len(again) <= len(source)
        assert again != source[: len(again)]  # its end comes first


def test_statements_are_of_their_passage_or_of_the_next_one():
    words = [f"w{number}." if number % 15 == 14 else f"w{number}" for number in range(900)]
    found = list(text_tasks.statements("numpy", words, random.Random(1)))
    assert [label for label, _ in found] == ["yes", "no"] * (len(found) // 2)
    assert len(found) >= 4
    for label, text in found:
        statement, passage = ({*part.split()} for part in text.split(text_tasks.BETWEEN))
        assert statement <= passage if label == "yes" else not statement & passage
        assert 170 <= len(passage) <= 280


def test_texts_of_all_tasks_come_with_as_many_of_each_label(tmp_path, monkeypatch):
    files = [tmp_path / f"m{number}.py" for number in range(60)]
    for number, file in enumerate(files):
        words = [f"m{number}w{place}." if place % 15 == 14 else f"m{number}w{place}" for place in range(900)]
        file.write_text(f'"""{" ".join(words)}"""\n')
    monkeypatch.setattr(text_tasks, "PACKAGES", ("numpy",))
    monkeypatch.setattr(text_tasks, "modules", lambda _: files)
    text_tasks.main(tmp_path / "out")
    for task, labels in {"pairs": ("same", "other"), "statements": ("yes", "no")}.items():
        for part in text_tasks.PARTS:
            lines = (tmp_path / "out" / task / f"{part}.tsv").read_text().splitlines()
            found = [line.split("\t")[1] for line in lines]
            assert found.count(labels[0]) == found.count(labels[1]) > 0
