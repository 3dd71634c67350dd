"""The tree of a conversation: opened, walked by keys, and cut."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, exported, names, retry_button, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def tree(page, say):
    """A conversation of three branches in the view of them: a second answer to "One" went on in two ways."""
    say("first")
    send_and_wait(page, "One")
    say("second")
    button(page, "Try again").click()
    expect(answer(page)).to_have_text("second")
    expect(retry_button(page)).to_be_visible()
    say("third")
    send_and_wait(page, "Two")
    turns(page).last.get_by_role("button", name="Edit").click()
    turns(page).last.get_by_label("Edit the question").fill("Three")
    say("fourth")
    turns(page).last.get_by_role("button", name="Ask again").click()
    expect(answer(page)).to_have_text("fourth")
    button(page, "Branches").click()
    tree = page.get_by_role("tree", name="Branches")
    expect(tree).to_be_visible()  # its module is loaded by then
    return tree


def words(tree) -> list[str]:
    return tree.locator(".branch-words").all_text_contents()


def test_the_tree_shows_all_branches_and_opens_one(page, tree):
    assert words(tree) == ["One", "first", "second", "Two", "third", "Three", "fourth"]
    levels = [item.get_attribute("aria-level") for item in tree.get_by_role("treeitem").all()]
    assert levels == ["1", "2", "2", "3", "3", "3", "3"]
    assert tree.locator("[aria-current]").locator(".branch-words").all_text_contents() == [
        "One",
        "second",
        "Three",
        "fourth",
    ]
    expect(page.get_by_role("dialog", name="Branches")).to_contain_text("3 branches")
    for key in ("ArrowUp", "ArrowLeft", "Home", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    expect(tree.locator(":focus")).to_contain_text("third")
    page.keyboard.press("Enter")
    expect(tree).to_be_hidden()
    expect(answer(page)).to_have_text("third")
    page.reload()
    expect(answer(page)).to_have_text("third")


def test_a_branch_is_deleted_for_good_and_can_be_put_back(page, tree, tmp_path):
    expect(tree.get_by_label("Delete the branch “One”")).to_be_hidden()  # that would be the whole conversation
    tree.get_by_label("Delete the branch “second”").click()
    expect(tree.get_by_role("treeitem")).to_have_count(2)
    expect(tree.locator(":focus")).to_contain_text("first")
    button(page, "Undo").click()
    assert words(tree) == ["One", "first", "second", "Two", "third", "Three", "fourth"]
    expect(answer(page)).to_have_text("fourth")
    tree.locator(":focus").press("Delete")
    expect(tree.get_by_role("treeitem")).to_have_count(2)
    page.keyboard.press("Escape")
    page.reload()
    expect(answer(page)).to_have_text("first")  # the copy in the browser's tables does not bring it back
    expect(page.get_by_label("Versions of the answer")).to_be_hidden()
    path = exported(page, "Export as JSON", tmp_path)
    assert "second" not in path.read_text()


def test_an_imported_copy_brings_a_deleted_branch_back(page, tree, tmp_path):
    page.keyboard.press("Escape")
    content = exported(page, "Export as JSON", tmp_path).read_text()
    button(page, "Branches").click()
    tree.get_by_label("Delete the branch “second”").click()
    page.keyboard.press("Escape")
    expect(answer(page)).to_have_text("first")
    page.get_by_label("Files to import").set_input_files(
        {"name": "copy.json", "mimeType": "", "buffer": content.encode()}
    )
    expect(page.locator("#complaint")).not_to_be_empty()  # it reports that the file is read
    expect(names(page)).to_have_count(1)
    page.reload()
    button(page, "Branches").click()
    assert sorted(words(tree)) == sorted(["One", "first", "second", "Two", "third", "Three", "fourth"])
