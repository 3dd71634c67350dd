"""Files and folders that are dropped on the page, texts and others."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import send_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def drop(page, path: Path) -> None:
    """Drop a file or folder of this machine, as a file manager does."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})
    session.detach()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_a_folder_is_attached_file_by_file(page, asked, tmp_path):
    folder = tmp_path / "work"
    write_files(folder, {"b.txt": b"second", "a/deep.txt": b"first", ".git/config": b"hidden", "x.bin": b"\0"})
    drop(page, folder)
    attached = page.get_by_label("Attached files").get_by_role("listitem")
    expect(attached).to_have_count(2)
    expect(attached.first).to_contain_text("work/a/deep.txt")
    expect(page.locator("#complaint")).to_have_text("x.bin is not a text file. Save it as text (UTF-8) first.")
    send_and_wait(page, "What is this?")
    assert "File work/a/deep.txt:\n```\nfirst" in asked()[0]


def test_a_folder_with_too_many_files_is_refused(page, tmp_path):
    write_files(tmp_path / "all", {f"{number}.txt": b"text" for number in range(101)})
    drop(page, tmp_path / "all")
    expect(page.locator("#complaint")).to_have_text(
        "The folder all has more than 100 files. Attach the important ones."
    )
    expect(page.get_by_label("Attached files")).to_be_hidden()


def test_other_kinds_are_refused_with_the_reason(page):
    kinds = {"a.mp3": ("audio/mpeg", "a.mp3 is a sound recording"), "b.zip": ("application/zip", "b.zip is an archive")}
    files = [{"name": name, "mimeType": kind, "buffer": b"\0\1"} for name, (kind, _) in kinds.items()]
    page.get_by_label("Files to attach").set_input_files(files)
    for _, reason in kinds.values():
        expect(page.locator("#complaint")).to_contain_text(reason)
    files = [{"name": "notes.txt", "mimeType": "text/plain", "buffer": "Grüße".encode("utf-16")}]
    page.get_by_label("Files to attach").set_input_files(files)
    expect(page.get_by_label("Attached files")).to_contain_text("notes.txt")
