"""Conversations are kept in the browser: listed, found, renamed, deleted and put back, exported and imported."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, clear, exported, history, import_file, names, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_conversations_are_listed_found_and_opened(page, say):
    expect(history(page)).to_contain_text("Conversations are kept here, in this browser alone.")
    say("Paris it is.")
    send_and_wait(page, "The capital of France?")
    button(page, "New conversation").click()
    expect(turns(page)).to_have_count(0)
    say("Rome it is.")
    send_and_wait(page, "The capital of Italy?")
    expect(names(page)).to_have_text(["The capital of Italy?", "The capital of France?"])  # the latest first

    page.reload()
    expect(answer(page)).to_have_text("Rome it is.")
    names(page).last.click()
    expect(answer(page)).to_have_text("Paris it is.")
    expect(names(page).last).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(answer(page)).to_have_text("Rome it is.")

    search = page.get_by_label("Search conversations")
    search.fill("paris CAPITAL")  # of an answer and of a question
    expect(names(page)).to_have_text(["The capital of France?"])
    search.fill("Berlin")
    expect(history(page)).to_contain_text("Nothing found.")
    search.fill("")
    expect(names(page)).to_have_count(2)


def test_the_open_one_is_in_view_in_a_long_list(page, tmp_path):
    import_file(page, tmp_path / "many.json", undated(*(f"No. {i}" for i in range(100))))
    expect(names(page)).to_have_count(100)
    for name in (names(page).last.text_content(), names(page).first.text_content()):
        page.evaluate(
            "(hash) => (location.hash = hash)", names(page).get_by_text(name, exact=True).get_attribute("href")
        )
        expect(page.locator(".prompt-text")).to_have_text(name)
        expect(names(page).get_by_text(name, exact=True)).to_be_in_viewport()
        page.reload()
        expect(names(page).get_by_text(name, exact=True)).to_be_in_viewport()


def undated(*questions):
    """A file's content: conversations without a time, in a form that the page imports."""
    return [{"messages": [{"role": "user", "content": text}]} for text in questions]


def test_an_import_without_times_keeps_the_order_of_the_files(page, say, tmp_path):
    say("Here.")
    send_and_wait(page, "Before")
    expected = [f"No. {i}" for i in range(60)]
    (tmp_path / "one.json").write_text(json.dumps(undated(*expected[:30])))
    (tmp_path / "two.json").write_text(json.dumps(undated(*expected[30:])))
    (tmp_path / "three.md").write_text("# Three\n\n<!-- moeflow: user -->\n**You:**\n\nthree?\n")
    files = [tmp_path / name for name in ("one.json", "two.json", "three.md")]
    page.get_by_label("Files to import").set_input_files(files)
    expect(names(page)).to_have_text([*expected, "Three", "Before"])
    expect(page.locator(".prompt-text")).to_have_text("No. 0")
    page.reload()
    expect(names(page)).to_have_text([*expected, "Three", "Before"])

    clear(page)
    dated = [{"title": str(it), "updatedAt": it, "messages": [OWN_PROMPT]} for it in (3, 5, 4)]
    dated.insert(1, {"title": "no time", "messages": [OWN_PROMPT]})
    content = {"format": "moeflow-conversations", "version": 1, "conversations": dated}
    import_file(page, tmp_path / "dated.json", content)
    expect(names(page)).to_have_text(["no time", "5", "4", "3"])


OWN_PROMPT = {"id": "a", "parent": "", "role": "user", "content": "x"}


def test_rename_delete_and_undo(page, say):
    say("Here.")
    send_and_wait(page, "Are you there?")
    button(page, "Rename").click()
    page.get_by_label("Name of the conversation").fill("First contact")
    page.keyboard.press("Enter")
    expect(names(page)).to_have_text(["First contact"])
    button(page, "Rename").click()
    page.keyboard.type("never mind")
    page.keyboard.press("Escape")
    expect(names(page)).to_have_text(["First contact"])
    expect(button(page, "Rename")).to_be_focused()

    button(page, "Delete").click()
    expect(names(page)).to_have_count(0)
    expect(turns(page)).to_have_count(0)
    button(page, "Undo").click()
    expect(names(page)).to_have_text(["First contact"])
    expect(answer(page)).to_have_text("Here.")
    page.reload()
    expect(names(page)).to_have_text(["First contact"])


def test_export_and_import(page, say, tmp_path):
    said = "# Not the title\n<!-- moeflow: user -->\n\\<!-- moeflow: assistant -->\n\n```\ncode\n```\n"
    say(said)
    send_and_wait(page, "What is it?")
    say("Another version")
    button(page, "Try again").click()
    expect(answer(page)).to_have_text("Another version")
    button(page, "Earlier version").click()
    markdown = exported(page, "Export as Markdown", tmp_path)
    whole = exported(page, "Export as JSON", tmp_path)
    everything = exported(page, "Export all", tmp_path)
    assert (markdown.name, whole.name, everything.name) == ("what-is-it.md", "what-is-it.json", "conversations.json")
    assert json.loads(everything.read_text())["conversations"] == json.loads(whole.read_text())["conversations"]
    assert markdown.read_text().startswith(
        "# What is it?\n\n<!-- moeflow: model fake-model -->\n\n<!-- moeflow: user -->\n**You:**\n\nWhat is it?\n"
    )

    clear(page)
    page.get_by_label("Files to import").set_input_files([whole])
    expect(answer(page)).to_contain_text("Not the title")
    button(page, "Later version").click()
    expect(answer(page)).to_have_text("Another version")

    clear(page)
    page.get_by_label("Files to import").set_input_files([markdown])
    expect(answer(page).get_by_role("heading")).to_have_text("Not the title")
    again = exported(page, "Export as Markdown", tmp_path)
    assert again.read_text() == markdown.read_text()
    assert said.rstrip("\n") in json.dumps(
        json.loads(exported(page, "Export as JSON", tmp_path).read_text())
    ).encode().decode("unicode_escape")

    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "moeflow-conv')
    page.get_by_label("Files to import").set_input_files([broken])
    expect(page.get_by_text("broken.json could not be imported: it is not JSON; it may be cut off.")).to_be_visible()


def test_import_from_elsewhere(page, tmp_path):
    """ChatGPT's export is a tree with other messages in between; a list of messages is what the API takes."""

    def node(name, parent, role, text, *children):
        message = role and {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}
        return {"id": name, "parent": parent, "message": message, "children": list(children)}

    nodes = [
        node("root", None, None, "", "system"),
        node("system", "root", "system", "", "ask"),
        node("ask", "system", "user", "Which colour?", "red", "search"),
        node("red", "ask", "assistant", "Red."),
        node("search", "ask", "assistant", "", "tool"),
        node("tool", "search", "tool", "found blue", "blue"),
        node("blue", "tool", "assistant", "Blue."),
    ]
    mapping = {it["id"]: it for it in nodes}
    theirs = [{"title": "Colours", "update_time": 1.5, "mapping": mapping, "current_node": "red"}]
    messages = {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]},
        ]
    }
    for name, content in {"conversations.json": theirs, "messages.json": messages}.items():
        (tmp_path / name).write_text(json.dumps(content))
    page.get_by_label("Files to import").set_input_files([tmp_path / "messages.json"])
    expect(answer(page)).to_have_text("Ho")
    page.get_by_label("Files to import").set_input_files([tmp_path / "conversations.json"])
    expect(answer(page)).to_have_text("Red.")
    expect(names(page)).to_have_text(["Hi", "Colours"])
    button(page, "Later version").click()
    expect(answer(page)).to_have_text("Blue.")


OPEN_WEBUI = {
    "id": "7d1c3a52-1111-4222-8333-444455556666",
    "user_id": "u",
    "title": "Capitals",
    "chat": {
        "title": "Capitals",
        "models": ["llama3:8b"],
        "history": {
            "currentId": "rome",
            "messages": {
                "ask": {
                    "id": "ask",
                    "parentId": None,
                    "childrenIds": ["rome", "paris"],
                    "role": "user",
                    "content": "Which capital?",
                    "timestamp": 1_700_000_000,
                    "models": ["llama3:8b"],
                    "files": [{"type": "file", "name": "list.txt", "file": {"data": {"content": "Rome, Paris"}}}],
                },
                "rome": {
                    "id": "rome",
                    "parentId": "ask",
                    "childrenIds": [],
                    "role": "assistant",
                    "content": '<details type="reasoning" done="true" duration="2">\n'
                    "<summary>Thought</summary>\n> Hm.\n</details>\nRome.",
                    "model": "llama3:8b",
                },
                "paris": {
                    "id": "paris",
                    "parentId": "ask",
                    "childrenIds": [],
                    "role": "assistant",
                    "content": "Paris.",
                },
            },
        },
        "messages": [],
    },
    "updated_at": 1_700_000_100,
    "created_at": 1_700_000_000,
    "archived": False,
}


@pytest.mark.parametrize("content", [[OPEN_WEBUI], OPEN_WEBUI["chat"]], ids=["export", "chat alone"])
def test_import_from_open_webui(page, tmp_path, content):
    import_file(page, tmp_path / "chat-export.json", content)
    expect(answer(page)).to_have_text("Rome.")
    expect(names(page)).to_have_text(["Capitals"])
    expect(page.get_by_text("list.txt · 11 bytes")).to_be_visible()
    expect(page.get_by_text("This conversation was held with llama3:8b")).to_be_visible()
    button(page, "Later version").click()
    expect(answer(page)).to_have_text("Paris.")


def test_what_is_here_already_is_not_imported_again(page, say, tmp_path):
    say("Here.")
    page.get_by_label("Files to attach").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"text"})
    send_and_wait(page, "Are you there?")
    say("Yes.")
    button(page, "Try again").click()
    expect(answer(page)).to_have_text("Yes.")
    files = [exported(page, f"Export as {kind}", tmp_path) for kind in ("Markdown", "JSON")]
    button(page, "Rename").click()
    page.keyboard.type("First contact")
    page.keyboard.press("Enter")
    button(page, "New conversation").click()
    send_and_wait(page, "And you?")
    files += [exported(page, "Export all", tmp_path)]
    known = page.get_by_text("Nothing is new: ")
    page.get_by_label("Files to import").set_input_files(files[1])
    expect(known).to_have_text("Nothing is new: the conversation is already here.")
    expect(page.locator(".prompt-text")).to_have_text("Are you there?")  # it is shown
    page.get_by_label("Files to import").set_input_files(files[2])
    expect(known).to_have_text("Nothing is new: all 2 conversations are already here.")
    expect(names(page)).to_have_text(["And you?", "First contact"])

    names(page).first.click()
    for kind in ("Markdown", "JSON"):
        page.get_by_label("Files to import").set_input_files(exported(page, f"Export as {kind}", tmp_path))
        expect(known).to_have_text("Nothing is new: the conversation is already here.")
    foreign = [{"title": "Theirs", "messages": [{"role": "user", "content": "x"}]}]
    for text in ("One conversation is imported.", "Nothing is new: the conversation is already here."):
        import_file(page, tmp_path / "foreign.json", foreign)
        expect(page.get_by_text(text)).to_be_visible()
    expect(names(page)).to_have_count(3)


def test_an_export_that_went_on_elsewhere_is_taken_in(page, say, tmp_path):
    say("Here.")
    send_and_wait(page, "Are you there?")
    file = exported(page, "Export as JSON", tmp_path)
    content = json.loads(file.read_text())
    last = content["conversations"][0]["messages"][-1]["id"]
    content["conversations"][0]["messages"] += [
        {"id": "p", "parent": last, "role": "user", "content": "Still?"},
        {"id": "q", "parent": "p", "role": "assistant", "content": "Still."},
    ]
    say("Other.")
    button(page, "Try again").click()
    expect(answer(page)).to_have_text("Other.")
    import_file(page, tmp_path / "later.json", content)
    expect(page.get_by_text("One conversation is imported.")).to_be_visible()
    expect(names(page)).to_have_text(["Are you there?"])
    expect(answer(page)).to_have_text("Other.")  # the path shown stays
    button(page, "Earlier version").click()
    expect(answer(page)).to_have_text("Still.")
    page.reload()
    expect(answer(page)).to_have_text("Still.")


def test_an_export_brings_back_what_was_deleted_since(page, say, tmp_path):
    say("Here.")
    send_and_wait(page, "Are you there?")
    file = exported(page, "Export as JSON", tmp_path)
    clear(page)
    page.get_by_label("Files to import").set_input_files(file)
    expect(answer(page)).to_have_text("Here.")
    page.reload()
    expect(names(page)).to_have_text(["Are you there?"])


@pytest.mark.parametrize(
    "content",
    [[], {"format": "moeflow-conversations", "version": 1, "conversations": []}, {"messages": []}],
)
def test_a_file_without_conversations_is_reported(page, tmp_path, content):
    import_file(page, tmp_path / "empty.json", content)
    expect(page.get_by_text("empty.json holds no conversations, so nothing was imported.")).to_be_visible()


def test_there_is_nothing_to_export_yet(page):
    button(page, "Export all").click()
    expect(page.get_by_text("There is no conversation to export yet.")).to_be_visible()
