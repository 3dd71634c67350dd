"""Two tabs at one conversation: nothing of either is lost, deletions last, each shows the other's changes."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import (
    answer,
    button,
    clear,
    expect_nothing_is_kept,
    names,
    open_settings,
    retry_button,
    send,
    send_and_wait,
    turns,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DEAF = "BroadcastChannel.prototype.addEventListener = () => {};"  # as a tab is that the browser put to sleep


@pytest.fixture
def other(page):
    """Open the page of `page` a second time, in the same browser, which has a process for each tab."""

    def other(*, is_deaf=False):
        tab = page.context.new_page()
        if is_deaf:
            tab.add_init_script(DEAF)
        tab.goto(page.url)
        return tab

    return other


def test_each_shows_what_the_other_did(page, say, other):
    say("First.")
    send_and_wait(page, "One?")
    tab = other()
    expect(answer(tab)).to_have_text("First.")
    say("Second.")
    send_and_wait(tab, "Two?")
    expect(turns(page)).to_have_count(2)
    expect(answer(page)).to_have_text("Second.")
    retry_button(tab).click()
    expect(turns(page).last.locator(".answer-foot .place")).to_have_text("1/2")  # this tab's view stays
    button(tab, "New conversation").click()
    send_and_wait(tab, "Three?")
    expect(names(page)).to_have_text(["Three?", "One?"])
    button(tab, "Rename").click()
    tab.keyboard.type("Third")
    tab.keyboard.press("Enter")
    expect(names(page)).to_have_text(["Third", "One?"])
    button(tab, "Delete").click()
    expect(names(page)).to_have_text(["One?"])


def test_settings_of_both_are_kept(page, say, other, engine):
    tab = other()
    changes = ((page, tab, "Temperature", "0.25"), (tab, page, "Top-p", "0.5"), (page, tab, "Seed", "1234"))
    for changed, told, label, value in changes:
        open_settings(changed)
        changed.get_by_label(label, exact=True).fill(value)
        changed.keyboard.press("Escape")
        expect(told.get_by_label(label, exact=True)).to_have_value(value)
    page.reload()
    say("Yes.")
    send_and_wait(page, "Ready?")
    sampling = engine.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 1234)


def test_answers_written_at_once_are_both_kept(page, say, go_on, other):
    say("First.")
    send_and_wait(page, "One?")
    tab = other()
    expect(answer(tab)).to_have_text("First.")
    say("Here I am and more of it.", until="Here I am")
    send(page, "Mine?")
    send(tab, "Yours?")
    for one in (page, tab):
        expect(answer(one)).to_have_text("Here I am")
    button(page, "Rename").click()
    page.keyboard.type("Ours")
    page.keyboard.press("Enter")
    expect(names(tab)).to_have_text(["Ours"])
    go_on()
    for one, question in ((page, "Mine?"), (tab, "Yours?")):
        expect(turns(one)).to_have_count(2)
        expect(turns(one).last.locator(".prompt-text")).to_have_text(question)
        expect(turns(one).last.locator(".prompt-foot .place")).to_be_visible()  # the other question's, next to it
    for one, question, other_question in ((page, "Mine?", "Yours?"), (tab, "Yours?", "Mine?")):
        one.reload()
        expect(names(one)).to_have_text(["Ours"])
        expect(answer(one)).to_have_text("Here I am and more of it.")
        expect(turns(one).last.locator(".prompt-text")).to_have_text(question)
        button(one, "Earlier version").and_(one.locator(":enabled")).or_(
            button(one, "Later version").and_(one.locator(":enabled"))
        ).click()
        expect(turns(one).last.locator(".prompt-text")).to_have_text(other_question)
        expect(answer(one)).to_have_text("Here I am and more of it.")


@pytest.mark.parametrize("remove", [lambda page: button(page, "Delete").click(), clear], ids=["delete", "clear"])
def test_removed_while_the_other_writes_to_it(page, say, other, remove):
    say("Here I am and more of it.", until="Here I am")
    send(page, "A secret")
    expect(answer(page)).to_have_text("Here I am")
    tab = other()
    expect(turns(tab)).to_have_count(1)
    remove(tab)
    expect(turns(page)).to_have_count(0)
    expect(page.get_by_text("was deleted in another tab")).to_be_visible()
    expect_nothing_is_kept(page)


def test_removed_and_the_other_has_not_heard_of_it(page, say, other):
    say("Here.")
    send_and_wait(page, "A secret")
    tab = other(is_deaf=True)
    expect(turns(tab)).to_have_count(1)
    button(page, "Delete").click()
    expect(names(page)).to_have_count(0)
    page.close()
    send(tab, "And more?")
    expect(tab.get_by_text("was deleted in another tab")).to_be_visible()
    expect(turns(tab)).to_have_count(0)
    expect_nothing_is_kept(tab)


def test_undo_in_one_is_heard_in_the_other(page, say, other):
    say("First.")
    send_and_wait(page, "One?")
    tab = other()
    button(page, "Delete").click()
    expect(turns(tab)).to_have_count(0)
    button(page, "Undo").click()
    names(tab).click()
    expect(answer(tab)).to_have_text("First.")
    say("Second.")
    send_and_wait(tab, "Two?")
    tab.reload()
    expect(answer(tab)).to_have_text("Second.")


def test_an_edit_stays_open_when_the_other_adds_a_turn(page, say, other):
    say("First.")
    send_and_wait(page, "One?")
    tab = other()
    expect(answer(tab)).to_have_text("First.")
    button(page, "Edit").click()
    editor = page.get_by_role("textbox", name="Edit the question")
    editor.fill("Something long")
    say("Second.")
    send_and_wait(tab, "Two?")
    expect(turns(page)).to_have_count(2)
    expect(editor).to_have_value("Something long")


# Three tabs do all that tabs may do, in any order: save, read the store, ask, write a piece, end well or badly.
RANDOM_TABS = """async (seed) => {
  const { Conversation } = await pageModule("conversations/conversation.js");
  const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
  const any = (list) => list[random(list.length)];
  let kept = new Conversation();
  kept.addPrompt("Begin.", []);
  kept = structuredClone(kept.record());
  const tabs = [0, 1, 2].map(() => ({ conversation: new Conversation(kept), writing: null }));
  let disturbed = false; // whether an answer that was being written was changed from elsewhere
  const truth = {}; // what came of each answer, by its id
  const save = ({ conversation }) => {
    conversation.absorb(new Conversation(kept));
    kept = structuredClone(conversation.record());
  };
  const end = (tab, state) => {
    tab.writing.state = truth[tab.writing.id].state = state;
    tab.writing = null;
  };
  for (let step = 0; step < 60; step += 1) {
    const tab = any(tabs);
    const action = random(6);
    if (action === 0) save(tab);
    else if (action === 1) tab.conversation.absorb(new Conversation(kept));
    else if (action === 2 && tab.writing) end(tab, any(["done", "failed", "stopped"]));
    else if (tab.writing) truth[tab.writing.id].content = tab.writing.content += any(["", "x", "yz"]);
    else {
      const { conversation } = tab;
      const prompts = conversation.messages.filter((it) => it.role === "user");
      const prompt = random(2) ? any(prompts) : conversation.addPrompt("More?", []);
      tab.writing = conversation.addAnswer(prompt);
      truth[tab.writing.id] = { content: "", state: "running" };
    }
    const isAtWork = ({ conversation: { messages }, writing: it }) => it.state === "running" && messages.includes(it);
    if (!tabs.every((it) => !it.writing || isAtWork(it))) disturbed = true;
  }
  for (const tab of tabs) {
    if (tab.writing) end(tab, "done");
    save(tab);
  }
  const found = Object.fromEntries(kept.messages.filter((it) => it.role === "assistant").map((it) => [it.id, it]));
  const lost = Object.keys(truth).filter((id) => truth[id].content && truth[id].content !== found[id]?.content);
  const wrong = Object.keys(found).filter((id) => truth[id].content && found[id].state !== truth[id].state);
  const ids = new Set([""]);
  const orphans = kept.messages.filter(({ id, parent }) => !ids.has(parent) || !ids.add(id));
  return { disturbed, lost, wrong, orphans };
}"""


def test_nothing_is_lost_whatever_tabs_do(page):
    for seed in range(1, 200):
        assert page.evaluate(RANDOM_TABS, seed) == {"disturbed": False, "lost": [], "wrong": [], "orphans": []}, seed
