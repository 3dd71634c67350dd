"""Actions of the user while the page still handles an earlier one: the last counts, nothing is lost."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import (
    answer,
    button,
    import_file,
    names,
    prompt_box,
    retry_button,
    send,
    send_and_wait,
    send_by_key,
    slow_store,
    turns,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def two(page, say, tmp_path):
    """A page with two conversations; the second is open."""
    import_file(page, tmp_path / "two.json", [{"messages": messages(name)} for name in ("Second", "First")])
    expect(answer(page)).to_have_text("Second answer")
    say("Here.")
    return page


def messages(name):
    return [{"role": "user", "content": name}, {"role": "assistant", "content": f"{name} answer"}]


def go_to(page, name):
    names(page).get_by_text(name, exact=True).click()


def expect_open(page, name, *questions):
    expect(names(page).get_by_text(name, exact=True)).to_have_attribute("aria-current", "page")
    expect(page.locator(".prompt-text")).to_have_text([name, *questions])


def test_sent_while_a_conversation_is_opened(two, asked):
    with slow_store(two):
        go_to(two, "First")
        send(two, "And then?")
    expect(answer(two)).to_have_text("Here.")
    expect_open(two, "First", "And then?")
    assert asked() == ["<|user|>First<|assistant|>First answer<|user|>And then?<|assistant|>"]
    go_to(two, "Second")
    expect_open(two, "Second")


# The browser's tables are there only after `letOpen`.
SLOW_TABLES = """
  const { open } = IDBFactory.prototype;
  const gate = new Promise((open) => (window.letOpen = open));
  IDBFactory.prototype.open = function (...of) {
    const request = open.apply(this, of);
    const set = (action) => request.addEventListener("success", () => gate.then(action));
    Object.defineProperty(request, "onsuccess", { set });
    return request;
  };
"""


def test_sent_before_the_page_has_read_its_conversation(two, asked):
    go_to(two, "First")
    expect_open(two, "First")
    two.add_init_script(SLOW_TABLES)
    two.reload()
    send(two, "And then?")
    expect(prompt_box(two)).to_have_value("")
    two.evaluate("letOpen()")
    expect(answer(two)).to_have_text("Here.")
    expect_open(two, "First", "And then?")
    assert asked() == ["<|user|>First<|assistant|>First answer<|user|>And then?<|assistant|>"]


def test_a_message_comes_back_where_the_user_went_on(two, engine):
    with slow_store(two):
        go_to(two, "First")
        send(two, "And then?")
        button(two, "New conversation").click()
        prompt_box(two).type("Please.")
    expect(prompt_box(two)).to_have_value("And then?\n\nPlease.")
    expect(turns(two)).to_have_count(0)
    assert not engine.submissions


def test_a_message_that_waits_is_not_sent_to_another_conversation(two, say, go_on, engine):
    say("Here I am.", until="Here")
    send(two, "Where?")
    expect(answer(two)).to_have_text("Here")
    send_by_key(two, "And then?")
    with slow_store(two):
        go_to(two, "First")
        go_on()
        expect(answer(two)).to_have_text("Here I am.")
        expect(prompt_box(two)).to_have_value("And then?")
    expect_open(two, "First")
    assert len(engine.submissions) == 1


def test_deleted_while_another_is_opened(two):
    with slow_store(two):
        go_to(two, "First")
        button(two, "Delete").click()
        expect(names(two)).to_have_text(["First"])
    expect_open(two, "First")
    go_to(two, "First")
    button(two, "Undo").click()
    expect_open(two, "Second")


HEAR = """() => {
  new BroadcastChannel("moeflow.conversations").onmessage = () => (window.hasHeard = true);
}"""


def test_deleted_in_another_tab_while_another_is_opened(two):
    tab = two.context.new_page()
    tab.goto(two.url)
    expect(answer(tab)).to_have_text("Second answer")
    with slow_store(two):
        go_to(two, "First")
        two.evaluate(HEAR)
        button(tab, "Delete").click()
        two.wait_for_function("() => window.hasHeard")  # the policy of the page refuses a plain expression
    expect_open(two, "First")
    expect(names(two)).to_have_text(["First"])
    expect(two.get_by_text("was deleted in another tab")).to_be_hidden()


# Saves begin only after `letSave`.
SLOW_SAVES = """async () => {
  const { ConversationStore } = await pageModule("conversations/store.js");
  const { save } = ConversationStore.prototype;
  const gate = new Promise((open) => (window.letSave = open));
  ConversationStore.prototype.save = async function (...of) {
    await gate;
    return save.apply(this, of);
  };
}"""


@pytest.mark.parametrize("what", ["import", "undo"])
def test_another_is_opened_before_one_is_kept(two, tmp_path, what):
    if what == "undo":
        button(two, "Delete").click()
        expect(names(two)).to_have_text(["First"])
    two.evaluate(SLOW_SAVES)
    if what == "undo":
        button(two, "Undo").click()
    else:
        import_file(two, tmp_path / "third.json", {"messages": messages("Third")})
    go_to(two, "First")
    expect_open(two, "First")
    two.evaluate("letSave()")
    expect(names(two)).to_have_count(2 if what == "undo" else 3)
    expect_open(two, "First")


# Files are read only after `letRead`.
SLOW_FILES = """() => {
  const { arrayBuffer } = Blob.prototype;
  const gate = new Promise((open) => (window.letRead = open));
  Blob.prototype.arrayBuffer = async function () {
    await gate;
    return arrayBuffer.call(this);
  };
}"""


@pytest.fixture
def attach(page, tmp_path):
    def attach(name, content):
        (tmp_path / name).write_bytes(content)
        page.get_by_label("Files to attach").set_input_files([tmp_path / name])

    return attach


def test_sent_while_files_are_read(two, attach, asked):
    two.evaluate(SLOW_FILES)
    attach("one.txt", b"one")
    attach("two.txt", b"two")
    send(two, "Which?")
    two.evaluate("letRead()")
    expect(answer(two)).to_have_text("Here.")
    for part in ("File one.txt:", "File two.txt:", "Which?"):
        assert part in asked()[0]
    expect(two.get_by_label("Attached files")).to_be_hidden()
    expect(retry_button(two)).to_be_visible()
    send_and_wait(two, "And now?")
    assert asked()[1].count("File one.txt:") == 1


def test_not_sent_without_its_file(two, attach, engine):
    two.evaluate(SLOW_FILES)
    attach("picture.png", b"\0")
    send(two, "What is it?")
    two.evaluate("letRead()")
    expect(two.get_by_text("picture.png is an image; this model reads text only.")).to_be_visible()
    expect(prompt_box(two)).to_have_value("What is it?")
    assert not engine.submissions
    button(two, "Send").click()
    expect(answer(two)).to_have_text("Here.")
