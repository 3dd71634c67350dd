"""Versions of questions and answers, messages that wait, attached files, thoughts and calls, and a full context."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import (
    answer,
    button,
    history,
    prompt_box,
    retry_button,
    send,
    send_and_wait,
    stream,
    tokens,
    turns,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_any_answer_can_be_asked_for_again_and_its_versions_stay(page, say, asked):
    say("Heads.")
    send_and_wait(page, "Toss a coin.")
    say("Bye.")
    send_and_wait(page, "Thanks.")
    say("Tails.")
    turns(page).first.get_by_role("button", name="Try again").click()
    expect(answer(page)).to_have_text("Tails.")
    expect(turns(page)).to_have_count(1)  # what came after belongs to the first version
    expect(turns(page).last.get_by_label("Versions of the answer")).to_contain_text("2/2")
    button(page, "Earlier version").click()
    expect(turns(page)).to_have_count(2)
    expect(answer(page)).to_have_text("Bye.")
    expect(button(page, "Later version")).to_be_focused()  # the other one is off now
    page.reload()
    expect(answer(page)).to_have_text("Bye.")
    button(page, "Later version").click()
    expect(answer(page)).to_have_text("Tails.")
    toss = "<|user|>Toss a coin.<|assistant|>"
    assert asked() == [toss, f"{toss}Heads.<|user|>Thanks.<|assistant|>", toss]


def test_a_question_can_be_edited(page, say, asked):
    say("Paris.")
    send_and_wait(page, "The capital of France?")
    say("Rome.")
    button(page, "Edit").click()
    box = page.get_by_label("Edit the question")
    expect(box).to_have_value("The capital of France?")
    box.fill("nothing")
    page.keyboard.press("Escape")
    expect(page.get_by_text("The capital of France?", exact=True).last).to_be_visible()
    expect(button(page, "Edit")).to_be_focused()

    button(page, "Edit").click()
    box.fill("The capital of Italy?")
    page.keyboard.press("Enter")
    expect(answer(page)).to_have_text("Rome.")
    expect(turns(page)).to_have_count(1)
    expect(page.get_by_label("Versions of the question")).to_contain_text("2/2")
    button(page, "Earlier version").click()
    expect(answer(page)).to_have_text("Paris.")
    expect(page.locator(".prompt-text")).to_have_text("The capital of France?")
    assert asked()[1] == "<|user|>The capital of Italy?<|assistant|>"


def test_an_edit_while_an_answer_is_written_is_not_lost(page, say, go_on, asked):
    say("One, two", until="One")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One")
    turns(page).last.locator(".edit").dispatch_event("click")  # it is out of view while the answer comes
    box = page.get_by_label("Edit the question")
    box.fill("Sing.")
    page.keyboard.press("Enter")
    expect(page.get_by_text("An answer is being written: stop it first, or wait for its end.")).to_be_visible()
    expect(box).to_have_value("Sing.")
    go_on()
    expect(answer(page)).to_have_text("One, two")
    expect(page.get_by_text("An answer is being written")).to_be_hidden()
    box.press("Enter")
    expect(page.locator(".prompt-text")).to_have_text("Sing.")
    expect(retry_button(page)).to_be_visible()
    assert len(asked()) == 2


def test_a_failed_answer_makes_room_for_the_next(page, say, engine):
    engine.fail_after = 0
    send_and_wait(page, "Lost?")
    expect(page.get_by_role("alert")).to_contain_text("out of memory")
    engine.fail_after = None
    say("Found.")
    retry_button(page).click()
    expect(answer(page)).to_have_text("Found.")
    expect(page.get_by_label("Versions of the answer")).to_be_hidden()


def test_a_message_waits_for_the_end_of_the_answer(page, say, go_on, asked):
    say("One, two, three", until="One")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One")
    prompt_box(page).fill("And then?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Your message will be sent after this answer.")).to_be_attached()
    expect(page.locator(".queued-text")).to_have_text("And then?")
    expect(prompt_box(page)).to_have_value("")
    page.locator(".queued").get_by_role("button", name="Edit").click()
    expect(prompt_box(page)).to_have_value("And then?")
    page.keyboard.press("Enter")
    go_on()
    expect(turns(page)).to_have_count(2)
    expect(answer(page)).to_have_text("One, two, three")
    expect(page.locator(".queued")).to_be_hidden()
    assert asked()[1] == "<|user|>Count.<|assistant|>One, two, three<|user|>And then?<|assistant|>"


def test_a_waiting_message_comes_back_after_a_stop(page, say, engine):
    say("One, two", until="One")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One")
    page.keyboard.type("No, sing.")
    page.keyboard.press("Enter")
    page.keyboard.type("Please.")
    button(page, "Stop").click()
    expect(prompt_box(page)).to_have_value("No, sing.\n\nPlease.")
    expect(turns(page)).to_have_count(1)
    assert len(engine.submissions) == 1


def test_an_error_of_a_file_goes_away_when_the_next_ones_are_fine(page):
    def attach(*contents):
        files = [{"name": f"{i}.txt", "mimeType": "", "buffer": content} for i, content in enumerate(contents)]
        page.get_by_label("Files to attach").set_input_files(files)

    complaint = page.locator("#complaint")
    attach(b"\0", b"fine", b"\0")
    expect(complaint).to_contain_text("0.txt is not a text file.")
    expect(complaint).to_contain_text("2.txt is not a text file.")  # not the last alone
    attach(b"fine")
    expect(complaint).to_be_empty()
    expect(page.get_by_label("Attached files").get_by_role("listitem")).to_have_count(2)


def test_text_files_are_attached(page, say, asked, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("```\ncode\n```\n", encoding="utf-8")
    binary, large = tmp_path / "picture.png", tmp_path / "large.log"
    binary.write_bytes(b"\x89PNG\r\n\0")
    large.write_bytes(b"x" * (2**20 + 1))
    picker = page.get_by_label("Files to attach")
    picker.set_input_files([binary])
    expect(page.get_by_text("picture.png is an image; this model reads text only.")).to_be_visible()
    picker.set_input_files([large])
    expect(page.get_by_text("large.log is 1.0 MiB; files may have up to 1.0 MiB.")).to_be_visible()
    picker.set_input_files([notes])
    button(page, "Remove notes.md").click()
    expect(page.get_by_label("Attached files")).to_be_hidden()

    drop = """() => {
      const files = new DataTransfer();
      files.items.add(new File(["```\\ncode\\n```\\n"], "notes.md"));
      for (const type of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(type, { dataTransfer: files, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop)
    expect(page.get_by_label("Attached files")).to_contain_text("notes.md")
    say("Seen.")
    send_and_wait(page, "What is this?")
    assert asked() == ["<|user|>File notes.md:\n````\n```\ncode\n```\n````\n\nWhat is this?<|assistant|>"]
    page.reload()
    page.get_by_text("notes.md · 13 bytes").click()
    expect(page.locator(".file pre")).to_have_text("```\ncode\n```\n")


def test_thoughts_and_calls_are_folded(page):
    body = stream(
        {"role": "assistant", "reasoning_content": "The user wants **weather**"},
        {"reasoning_content": "."},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "weather", "arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        {"content": "It is sunny."},
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    send_and_wait(page, "Weather?")
    expect(answer(page)).to_have_text("It is sunny.")
    thoughts = turns(page).locator(".thinking-text")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Thought for 0.0 s").click()
    expect(thoughts).to_have_text("The user wants weather.")
    expect(thoughts.locator("strong")).to_have_text("weather")
    page.get_by_text("Called weather").click()
    expect(turns(page).locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
    page.reload()
    expect(page.get_by_text("Thought for 0.0 s")).to_be_visible()


def test_the_first_turns_are_left_out_when_the_context_is_full(page, say, engine, asked):
    say("a" * 900)
    for count in range(1, 4):
        send_and_wait(page, f"Question {count}?")
    frame = len("<|user|><|assistant|>")  # a token is a byte
    earlier = 3 * (frame + len("Question 1?") + 900)
    expect(tokens(page, "Earlier turns")).to_have_text(f"{earlier:,}")
    expect(tokens(page, "Context")).to_have_text(f"{earlier + frame:,} of 4,096 tokens")
    expect(page.locator("#context-warning")).to_contain_text("The context is nearly full")
    expect(page.locator(".left-out:visible")).to_have_count(0)
    button(page, "Settings").click()
    page.get_by_label("Max tokens", exact=True).fill("1000")
    button(page, "Done").click()
    prompt_box(page).fill("x" * 1400)
    expect(tokens(page, "This message")).to_have_text("1,400")
    expect(page.locator("#context-warning")).to_have_text(
        "The context is full: the model will not see the first 2 questions and their answers."
    )
    send_and_wait(page, "x" * 1400)
    shown = turns(page).last.get_by_text("The context is full")
    expect(shown).to_have_text("The context is full: the model no longer saw the first 2 questions and their answers.")
    assert asked()[-1] == f"<|user|>Question 3?<|assistant|>{'a' * 900}<|user|>{'x' * 1400}<|assistant|>"
    expect(history(page).get_by_role("link")).to_have_count(1)

    prompt_box(page).fill("x" * 5000)
    too_long = f"This message alone is too long: {5000 + frame:,} of 4,096 tokens."
    expect(page.locator("#context-warning")).to_have_text(too_long)
    expect(button(page, "Send")).to_be_disabled()
    prompt_box(page).press("Enter")
    expect(prompt_box(page)).to_have_value("x" * 5000)
    prompt_box(page).fill("x")
    expect(button(page, "Send")).to_be_enabled(timeout=200)  # before it is counted


def test_text_from_right_to_left(page, say):
    say("שלום עולם\n\nplain")
    send_and_wait(page, "مرحبا")
    directions = "elements => elements.map(it => getComputedStyle(it).direction)"
    assert answer(page).locator("p").evaluate_all(directions) == ["rtl", "ltr"]
    assert page.locator(".prompt-text").evaluate_all(directions) == ["rtl"]
    say("- 1: שלום\n- plain\n\n> ציטוט\n\n| שם | value |\n| -- | -- |\n| plain | 1 |\n\n- plain\n- עולם")
    send_and_wait(page, "Blocks")
    assert answer(page).locator("ul, blockquote, table").evaluate_all(directions) == ["rtl", "rtl", "rtl", "ltr"]
    assert answer(page).locator("li, td").evaluate_all(directions) == ["rtl", "rtl", "ltr", "ltr", "ltr", "ltr"]
    prompt_box(page).fill("שלום")
    assert page.locator("#prompt").evaluate_all(directions) == ["rtl"]


@pytest.mark.parametrize("options", [{}, {"has_touch": True, "is_mobile": True}], ids=["pointer", "touch"])
def test_actions_of_earlier_turns_show_without_a_pointer_over_them(app, serve, open_page, say, options):
    page = open_page(serve(app), **options)
    say("Here.")
    send_and_wait(page, "Are you there?")
    send_and_wait(page, "And now?")
    page.mouse.move(0, 0)
    earlier = turns(page).first
    for name in ("Copy question", "Edit", "Copy", "Try again"):
        action = earlier.get_by_role("button", name=name, exact=True)
        assert action.evaluate("(it) => it.checkVisibility({ opacityProperty: true, visibilityProperty: true })"), name
    earlier.get_by_role("button", name="Copy question").focus()
    page.keyboard.press("Tab")
    expect(earlier.get_by_role("button", name="Edit")).to_be_focused()
