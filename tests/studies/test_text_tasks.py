"""Texts of tasks: of the right length, of their package, none in two files."""

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
    for task, (shortest, longest) in text_tasks.TASKS.items():
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
