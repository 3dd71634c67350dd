"""A server of several models: the model asked, and conversations that continue with their own model."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.server.fleet import make_fleet
from tests.server.page.parts import answer, button, exported, import_file, names, send, send_and_wait, slow_store

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def fleet(tokenizer):
    return make_fleet(tokenizer)  # of models a, b, c and huge


@pytest.fixture
def app(fleet):
    return fleet.app


def choice(page):
    return page.get_by_label("Model", exact=True)


def notice(page):
    return page.get_by_text("This conversation was held with")


@pytest.fixture
def asked(fleet, page):
    """Return who was asked so far, in order."""
    found: list[str] = []
    page.on("request", lambda it: it.url.endswith("/completions") and found.append(it.post_data_json["model"]))
    return found


@pytest.fixture
def held(page, tmp_path):
    """A page with a conversation that was held with a, one with b, and nothing open; c is chosen for others."""
    turn = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
    conversations = [{"title": f"Held with {model}", "model": model, "messages": turn} for model in ("a", "b")]
    import_file(page, tmp_path / "held.json", conversations)
    expect(choice(page)).to_have_value("a")
    button(page, "New conversation").click()
    choice(page).select_option("c")
    return page


def test_one_of_several_models_can_be_chosen(page, asked, fleet):
    counted: list[str] = []
    page.on("request", lambda it: it.url.endswith("/tokenize") and counted.append(it.post_data_json["model"]))
    expect(choice(page)).to_have_value("a")
    choice(page).select_option("b")
    expect(page.get_by_text("Loaded when you first ask it")).to_be_visible()
    send_and_wait(page, "Hello?")
    expect(page).to_have_title("b · moeflow")
    button(page, "New conversation").click()
    page.reload()
    expect(choice(page)).to_have_value("b")
    expect(page).to_have_title("b · moeflow")
    send_and_wait(page, "Hello?")
    send_and_wait(page, "Hello again?" * 15)  # the context is nearly full: the server counts
    assert asked == ["b", "b", "b"]
    assert set(counted) == {"b"}  # also for the meter of the context: to count with another would load it
    button(page, "New conversation").click()
    choice(page).select_option("c")
    page.go_back()
    expect(choice(page)).to_have_value("b")  # it was held with that
    button(page, "New conversation").click()
    expect(choice(page)).to_have_value("c")


def test_there_is_nothing_to_choose_with_one_model(make_app, serve, open_page):
    page = open_page(serve(make_app()))
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    expect(choice(page)).to_be_hidden()


def test_a_conversation_goes_on_with_its_model(held, asked):
    names(held).get_by_text("Held with a").click()
    expect(choice(held)).to_have_value("a")
    names(held).get_by_text("Held with b").click()
    expect(choice(held)).to_have_value("b")
    send_and_wait(held, "And more?")
    expect(held).to_have_title("b · moeflow")
    names(held).get_by_text("Held with a").click()
    expect(held.get_by_text("Loaded when you first ask it")).to_be_visible()
    expect(held.get_by_role("heading", level=1)).to_have_text("moeflow")
    send_and_wait(held, "And more?")
    assert asked == ["b", "a"]
    held.reload()
    expect(choice(held)).to_have_value("a")
    button(held, "New conversation").click()
    expect(choice(held)).to_have_value("c")
    held.go_back()
    expect(choice(held)).to_have_value("a")
    expect(notice(held)).to_be_hidden()


def test_another_model_chosen_on_the_way_is_kept(held, asked):
    names(held).get_by_text("Held with a").click()
    expect(answer(held)).to_have_text("Hi.")
    choice(held).select_option("b")
    button(held, "New conversation").click()
    names(held).get_by_text("Held with a").click()
    expect(choice(held)).to_have_value("b")
    held.reload()
    expect(choice(held)).to_have_value("b")
    send_and_wait(held, "And more?")
    assert asked == ["b"]


def test_another_model_chosen_while_a_conversation_is_opened(held, asked):
    names(held).get_by_text("Held with b").click()
    expect(choice(held)).to_have_value("b")
    with slow_store(held):
        names(held).get_by_text("Held with a").click()
        choice(held).select_option("c")
    expect(names(held).get_by_text("Held with a")).to_have_attribute("aria-current", "page")
    expect(choice(held)).to_have_value("c")
    send_and_wait(held, "And more?")
    assert asked == ["c"]
    names(held).get_by_text("Held with b").click()
    expect(choice(held)).to_have_value("b")  # it was left when that was chosen
    names(held).get_by_text("Held with a").click()
    expect(choice(held)).to_have_value("c")
    held.reload()
    expect(choice(held)).to_have_value("c")


def test_a_model_is_chosen_for_one_conversation_and_another_is_opened(held):
    with slow_store(held):
        names(held).get_by_text("Held with a").click()
        choice(held).select_option("c")
        names(held).get_by_text("Held with b").click()
    expect(names(held).get_by_text("Held with b")).to_have_attribute("aria-current", "page")
    expect(choice(held)).to_have_value("b")
    held.reload()
    expect(choice(held)).to_have_value("b")


def test_another_model_chosen_while_an_answer_is_written(held, asked, fleet):
    fleet.is_paused = True
    send(held, "Held with c")
    expect(answer(held)).to_have_text("G")
    choice(held).select_option("a")
    fleet.is_paused = False
    fleet.go_on()
    expect(answer(held)).to_contain_text("world")
    expect(choice(held)).to_have_value("a")
    send_and_wait(held, "And more?")
    assert asked == ["c", "a"]


def test_tabs_at_one_conversation_have_one_model(held):
    names(held).get_by_text("Held with a").click()
    expect(choice(held)).to_have_value("a")
    tab = held.context.new_page()
    tab.goto(held.url)
    expect(choice(tab)).to_have_value("a")
    choice(tab).select_option("b")
    expect(choice(held)).to_have_value("b")
    send_and_wait(held, "And more?")
    tab.reload()
    expect(choice(tab)).to_have_value("b")


def test_files_carry_the_model(held, tmp_path):
    names(held).get_by_text("Held with b").click()
    whole = exported(held, "Export as JSON", tmp_path)
    assert [it["model"] for it in json.loads(whole.read_text())["conversations"]] == ["b"]
    markdown = exported(held, "Export as Markdown", tmp_path)
    for file in (whole, markdown):
        button(held, "Delete").click()
        expect(choice(held)).to_have_value("c")
        held.get_by_label("Files to import").set_input_files([file])
        expect(choice(held)).to_have_value("b")
    import_file(held, tmp_path / "body.json", {"model": "a", "messages": [{"role": "user", "content": "As sent"}]})
    expect(choice(held)).to_have_value("a")


def test_a_model_that_is_not_served(held, asked, tmp_path):
    import_file(held, tmp_path / "gone.json", {"model": "gone", "messages": [{"role": "user", "content": "Old"}]})
    expect(notice(held)).to_have_text(
        "This conversation was held with gone, which this server does not have. c will answer."
    )
    expect(choice(held)).to_have_value("c")
    names(held).get_by_text("Held with a").click()
    expect(notice(held)).to_be_hidden()
    names(held).get_by_text("Old").click()
    held.reload()
    expect(notice(held)).to_contain_text("gone")
    choice(held).select_option("b")  # from now on it is held with that
    expect(notice(held)).to_be_hidden()
    send_and_wait(held, "New?")
    assert asked == ["b"]
    held.reload()
    expect(choice(held)).to_have_value("b")
    expect(notice(held)).to_be_hidden()


def test_asking_is_going_on_with_the_model_that_is_there(make_app, serve, open_page, tmp_path):
    page = open_page(serve(make_app()))
    import_file(page, tmp_path / "gone.json", {"model": "gone", "messages": [{"role": "user", "content": "Old"}]})
    expect(notice(page)).to_contain_text("fake-model will answer.")
    send_and_wait(page, "New?")
    expect(page.locator(".prompt-text")).to_have_text(["Old", "New?"])  # the first was never answered
    expect(notice(page)).to_be_hidden()
    whole = exported(page, "Export as JSON", tmp_path)
    assert json.loads(whole.read_text())["conversations"][0]["model"] == "fake-model"


WITHOUT_MODEL = """async () => {
  const { Conversation } = await pageModule("conversations/conversation.js");
  const { openTables } = await pageModule("conversations/tables.js");
  const conversation = new Conversation();
  conversation.addPrompt("Held long ago", []);
  const { model, ...record } = conversation.record();
  const { id, updatedAt } = record;
  const tables = await openTables("moeflow", ["heads", "records"]);
  await tables.update(id, () => ({ heads: { id, name: "Held long ago", updatedAt }, records: record }));
}"""


def test_conversations_kept_without_a_model(held, asked):
    """As earlier pages kept them: the model chosen last answers, and is kept."""
    held.evaluate(WITHOUT_MODEL)
    held.reload()
    names(held).get_by_text("Held with a").click()
    names(held).get_by_text("Held long ago").click()
    expect(choice(held)).to_have_value("c")
    expect(notice(held)).to_be_hidden()
    send_and_wait(held, "And now?")
    choice(held).select_option("c")
    button(held, "New conversation").click()
    choice(held).select_option("a")
    names(held).get_by_text("Held long ago").click()
    expect(choice(held)).to_have_value("c")
    assert asked == ["c"]


# Fake tables, so that a choice falls between the written content and the end of writing.
CHANGED_MEANWHILE = """async () => {
  const { Conversation } = await pageModule("conversations/conversation.js");
  const { ConversationStore } = await pageModule("conversations/store.js");
  const conversation = new Conversation();
  conversation.addPrompt("Hello?", []);
  const store = new ConversationStore();
  conversation.useModel("a");
  let kept;
  const update = async (id, merge) => {
    kept = structuredClone(merge({ records: kept }).records);
    if (kept.model === "a") conversation.useModel("b");
    if (!kept.title) conversation.rename("Title");
  };
  store.tables = Promise.resolve({ update });
  await store.save(conversation);
  await store.save(conversation);
  return [kept.model, kept.title, conversation.changed.size];
}"""


def test_a_change_while_the_one_before_is_saved(page):
    assert page.evaluate(CHANGED_MEANWHILE) == ["b", "Title", 0]


def test_numbers_of_the_model_before_come_too_late(page):
    """The page shows the chosen model, regardless of the order of the server's answers."""
    waiting = []
    choice(page).select_option("b")
    send_and_wait(page, "Hello?")
    expect(page).to_have_title("b · moeflow")
    page.route("**/stats?watch=true&model=b", lambda route: waiting.append(route))
    page.wait_for_event("request", lambda it: it.url.endswith("/stats?watch=true&model=b"))
    choice(page).select_option("a")
    expect(page.get_by_text("Loaded when you first ask it")).to_be_visible()
    with page.expect_response("**/stats?watch=true&model=b"):
        waiting.pop().continue_()
    page.evaluate("new Promise((done) => setTimeout(done, 50))")
    expect(page.get_by_text("Loaded when you first ask it")).to_be_visible(timeout=1)
