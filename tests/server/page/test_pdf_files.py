"""PDFs are attached as their text, or refused with the reason."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import button, prompt_box, send_and_wait
from tests.server.page.pdf_files import FONT_OF_A_TABLE, LOCKED, pdf

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def attach(page, **files: bytes) -> None:
    files = [
        {"name": f"{name}.pdf", "mimeType": "application/pdf", "buffer": content} for name, content in files.items()
    ]
    page.get_by_label("Files to attach").set_input_files(files)


def test_the_text_of_every_page_is_sent(page, asked):
    loaded = page.evaluate("performance.getEntriesByType('resource').filter(it => it.name.includes('pdf')).length")
    assert loaded == 0  # only who attaches one pays for it
    attach(page, report=pdf("First page", "", "Third page"))
    expect(page.get_by_label("Attached files")).to_contain_text("report.pdf")
    send_and_wait(page, "What is this?")
    assert "File report.pdf:" in asked()[0]
    assert "[Page 1]\nFirst page\n\n[Page 2]\n(no text on this page)\n\n[Page 3]\nThird page" in asked()[0]


def test_a_pdf_without_text_is_refused_with_the_reason(page):
    files = {
        "locked": pdf("Secret", trailer=LOCKED),
        "scanned": pdf("", ""),
        "damaged": b"%PDF-1.7\n" + bytes(range(256)) * 40,
        "old": pdf("\\223\\372\\226\\173", font=FONT_OF_A_TABLE),
    }
    reasons = {
        "locked": "locked.pdf is protected by a password.",
        "scanned": "scanned.pdf has no text: its pages are pictures. Have them read (OCR) first.",
        "damaged": "damaged.pdf could not be read as a PDF; it may be damaged.",
        "old": "old.pdf needs a table of characters that this page does not have (90ms-RKSJ-H",
    }
    attach(page, **files)
    for reason in reasons.values():
        expect(page.locator("#complaint")).to_contain_text(reason)
    expect(page.get_by_label("Attached files")).to_be_hidden()


def test_a_long_pdf_shows_how_far_it_is_and_can_be_left(page):
    attach(page, book=pdf(*["A page"] * 900))
    expect(page.get_by_label("Attached files")).to_contain_text("of 900")
    button(page, "Remove book.pdf").click()
    expect(page.get_by_label("Attached files")).to_be_hidden()
    expect(prompt_box(page)).to_be_focused()
    attach(page, longer=pdf(*["A page"] * 1001))
    expect(page.locator("#complaint")).to_contain_text("longer.pdf has 1001 pages; up to 1000 are read.")
