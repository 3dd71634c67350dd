"""What a conversation is held with: presets of settings, and a system prompt of its own."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, exported, import_file, names, open_settings, send_and_wait, tokens

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def own_system(page):
    return page.get_by_label("System prompt of this conversation")


def write_system(page, text):
    """Write the open conversation's own system prompt."""
    if not own_system(page).is_visible():
        page.get_by_text("System prompt:").click()
    own_system(page).fill(text)
    own_system(page).blur()


def preset(page):
    """The choice of a preset above the conversation."""
    return page.get_by_label("Preset of this conversation")


def add_preset(page, name, **values):
    """Keep a preset with these values, by their fields' labels, and hold the open conversation with it."""
    open_settings(page)
    page.get_by_text("Manage presets").click()
    page.get_by_label("Name", exact=True).fill(name)
    button(page, "Save as a new preset").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_text("Manage presets").click()
    button(page, "Done").click()


def test_each_conversation_has_its_own_system_prompt(page, say, asked, tmp_path):
    say("Yes.")
    open_settings(page)
    page.get_by_label("System prompt", exact=True).fill("Be kind.")
    button(page, "Done").click()
    expect(page.locator("#own-system summary")).to_have_text("System prompt: of the preset Default · Be kind.")
    write_system(page, "Be brief.")
    expect(tokens(page, "System prompt")).to_have_text(str(len("<|system|>Be brief.<|user|><|assistant|>")))  # bytes
    send_and_wait(page, "One?")
    button(page, "New conversation").click()
    send_and_wait(page, "Two?")
    tab = page.context.new_page()
    tab.goto(page.url)
    expect(answer(tab)).to_have_text("Yes.")
    write_system(tab, "")  # none at all
    expect(page.locator("#own-system summary")).to_have_text("System prompt: of this conversation")
    send_and_wait(page, "Three?")
    names(page).get_by_text("One?").click()
    page.reload()
    expect(page.locator("#own-system summary")).to_have_text("System prompt: of this conversation · Be brief.")
    assert [prompt.split("<|user|>")[0] for prompt in asked()] == ["<|system|>Be brief.", "<|system|>Be kind.", ""]

    whole = exported(page, "Export as JSON", tmp_path)
    markdown = exported(page, "Export as Markdown", tmp_path)
    for file in (whole, markdown):
        button(page, "Delete").click()
        page.get_by_label("Files to import").set_input_files([file])
        expect(page.locator("#own-system summary")).to_contain_text("of this conversation · Be brief.")
    page.get_by_text("System prompt:").click()
    button(page, "Use that of the preset").click()
    expect(own_system(page)).to_have_value("Be kind.")


def test_a_system_prompt_comes_with_messages_as_the_api_takes_them(page, say, asked, tmp_path):
    say("Yes.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    import_file(page, tmp_path / "body.json", {"messages": messages})
    expect(page.locator("#own-system summary")).to_contain_text("of this conversation · Be brief.")
    send_and_wait(page, "Two?")
    assert asked() == ["<|system|>Be brief.<|user|>Two?<|assistant|>"]


def test_conversations_are_held_with_presets(page, say, engine, asked):
    say("Yes.")
    expect(preset(page)).to_be_hidden()  # there is one only
    send_and_wait(page, "One?")
    button(page, "New conversation").click()
    add_preset(page, "Strict", Temperature="0.25", System_prompt="Be strict.")
    expect(preset(page).locator("option:checked")).to_have_text("Strict")
    send_and_wait(page, "Two?")
    page.reload()
    expect(preset(page).locator("option:checked")).to_have_text("Strict")
    names(page).get_by_text("One?").click()
    expect(preset(page).locator("option:checked")).to_have_text("Default")
    send_and_wait(page, "Three?")
    assert [it.sampling.temperature for it in engine.submissions] == [1.0, 0.25, 1.0]
    assert ["Be strict." in prompt for prompt in asked()] == [False, True, False]
    preset(page).select_option(label="Strict")
    button(page, "New conversation").click()
    expect(preset(page).locator("option:checked")).to_have_text("Default")


def test_changes_saved_as_a_new_preset_leave_the_old_one_as_it_was(page, say, engine, asked):
    say("Yes.")
    open_settings(page)
    page.get_by_label("System prompt", exact=True).fill("Be strict.")
    page.get_by_text("Manage presets").click()
    page.get_by_label("Name", exact=True).fill("Strict")
    button(page, "Save as a new preset").click()
    expect(page.get_by_label("System prompt", exact=True)).to_have_value("Be strict.")
    page.locator("#preset").select_option(label="Default")
    expect(page.get_by_label("System prompt", exact=True)).to_have_value("")
    page.get_by_label("Temperature", exact=True).fill("0.25")  # is kept with the preset
    page.locator("#preset").select_option(label="Strict")
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("")
    page.keyboard.press("Escape")
    send_and_wait(page, "One?")
    preset(page).select_option(label="Default")
    send_and_wait(page, "Two?")
    assert [it.sampling.temperature for it in engine.submissions] == [1.0, 0.25]
    assert ["Be strict." in prompt for prompt in asked()] == [True, False]


def test_presets_are_renamed_exported_imported_and_deleted(page, say, engine, tmp_path):
    say("Yes.")
    add_preset(page, "Strict", Temperature="0.25")
    open_settings(page)
    page.get_by_text("Manage presets").click()
    page.get_by_label("For new conversations").check()
    page.get_by_label("Name", exact=True).fill("Default")  # is taken
    button(page, "Rename").click()
    file = export_presets(page, tmp_path)
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#preset-manager").get_by_role("button", name="Delete").click()
    expect(page.locator("#preset option")).to_have_text(["Default"])
    content = json.loads(file.read_text())
    content["items"][0]["values"] |= {"top_p": 7, "seed": "x", "unknown": 1}  # out of range, or of no setting
    file.write_text(json.dumps(content))
    page.get_by_label("Presets to import").set_input_files([file])
    expect(page.locator("#preset option")).to_have_text(["Default", "Default 2"])
    page.get_by_label("Presets to import").set_input_files([file])  # again
    expect(page.locator("#preset option")).to_have_text(["Default", "Default 2"])
    page.locator("#preset").select_option(label="Default 2")
    page.get_by_label("For new conversations").check()
    file.write_text("{")
    page.get_by_label("Presets to import").set_input_files([file])
    expect(page.locator("#preset-manager .wrong")).to_contain_text("presets.json could not be imported")
    button(page, "Done").click()
    button(page, "New conversation").click()
    page.reload()
    send_and_wait(page, "Ready?")
    sampling = engine.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 1.0, None)


def export_presets(page, folder):
    with page.expect_download() as download:
        page.locator("#preset-manager").get_by_role("button", name="Export").click()
    download.value.save_as(folder / "presets.json")
    return folder / "presets.json"
