from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, history, open_settings, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def requests_of(page):
    """Return the bodies of the requests for answers, in order."""
    bodies: list[dict] = []
    page.on("request", lambda it: it.url.endswith("/completions") and bodies.append(it.post_data_json))
    return bodies


def serve_defaults(page, **defaults):
    """Have the server tell these defaults of its model, from the next reload on."""
    card = {"id": "fake-model", "object": "model", "default_sampling_params": defaults}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [card]}))
    page.reload()


def fill(page, values):
    open_settings(page)
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    button(page, "Done").click()


def sent(submission):
    sampling = submission.sampling
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.seed


def test_settings_reach_the_request_and_are_remembered(page, say, asked, engine):
    say("Yes.")
    values = {
        "System prompt": "Be brief.",
        "Temperature": "0.25",
        "Top-p": "0.5",
        "Top-k": "40",
        "Max tokens": "77",
        "Seed": "1234",
    }
    open_settings(page)
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.keyboard.press("Escape")
    expect(button(page, "Settings")).to_be_focused()
    page.reload()
    send_and_wait(page, "Ready?")
    assert sent(engine.submissions[0]) == (0.25, 0.5, 40, 77, 1234)
    assert asked() == ["<|system|>Be brief.<|user|>Ready?<|assistant|>"]


def test_settings_can_be_reset(page, say, asked, engine):
    say("Yes.")
    open_settings(page)
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0.25")
    page.get_by_label("Seed", exact=True).fill("1234")
    button(page, "Reset to defaults").click()
    button(page, "Done").click()
    send_and_wait(page, "Ready?")
    assert sent(engine.submissions[0]) == (1.0, 1.0, 0, 1024, None)  # the server's
    assert asked() == ["<|user|>Ready?<|assistant|>"]


def test_a_setting_out_of_range_is_explained_and_not_used(page, say, engine):
    say("Yes.")
    open_settings(page)
    field = page.get_by_label("Temperature", exact=True)
    field.fill("9")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("Value must be less than or equal to 2.")
    button(page, "Done").click()
    expect(field).to_have_value("")
    expect(field).to_have_attribute("aria-invalid", "false")
    send_and_wait(page, "Ready?")
    assert engine.submissions[0].sampling.temperature == 1.0


def test_no_limit_of_tokens(page, say, engine):
    say("Yes.")
    open_settings(page)
    page.get_by_label("Max tokens", exact=True).fill("")
    button(page, "Done").click()
    send_and_wait(page, "Ready?")
    assert sent(engine.submissions[0]) == (1.0, 1.0, 0, None, None)


def test_only_what_the_user_has_set_is_sent(page, say):
    say("Yes.")
    bodies = requests_of(page)
    send_and_wait(page, "Ready?")
    assert set(bodies[0]) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    fill(page, {"Min-p": "0.1", "Repetition penalty": "1.3"})
    send_and_wait(page, "Ready?")
    assert set(bodies[1]) - set(bodies[0]) == {"min_p", "repetition_penalty"}
    fill(page, {"Min-p": ""})
    send_and_wait(page, "Ready?")
    assert set(bodies[2]) - set(bodies[0]) == {"repetition_penalty"}


def test_empty_fields_show_the_defaults_of_the_model(page, say):
    def placeholders():
        labels = ("Temperature", "Top-p", "Top-k", "Min-p", "Repetition penalty", "Max tokens", "Seed")
        return [page.get_by_label(label, exact=True).get_attribute("placeholder") for label in labels]

    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    assert placeholders() == ["default"] * 5 + ["no limit", "random"]
    serve_defaults(page, temperature=0.2, top_p=0.9, repetition_penalty=1.1, top_k=0)
    temperature = page.get_by_label("Temperature", exact=True)
    expect(temperature).to_have_attribute("placeholder", "0.2")
    assert placeholders() == ["0.2", "0.9", "0", "default", "1.1", "no limit", "random"]
    expect(temperature).to_have_value("")
    say("Yes.")
    bodies = requests_of(page)
    send_and_wait(page, "Ready?")
    assert "temperature" not in bodies[0]


def test_defaults_that_come_with_loading_are_shown(page):
    serve_defaults(page)
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    page.unroute("**/v1/models")
    card = {"id": "fake-model", "default_sampling_params": {"temperature": 0.6}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    open_settings(page)
    expect(page.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", "0.6")


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_more_settings_reach_the_engine(page, say, engine):
    say("Yes.")
    fill(
        page,
        {
            "Min-p": "0.05",
            "Repetition penalty": "1.2",
            "Stop strings": "END\n\\n\\n\nthe end",
            "JSON schema": json.dumps(SCHEMA, indent=1),
        },
    )
    page.reload()
    bodies = requests_of(page)
    send_and_wait(page, "Ready?")
    sampling = engine.submissions[0].sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.2)
    assert list(sampling.stop) == ["END", "\n\n", "the end"]
    assert '"city"' in sampling.grammar
    assert bodies[0]["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("label", "value", "complaint"),
    [
        ("JSON schema", '{"type": ', "This is not JSON: "),
        ("JSON schema", "[1]", "A schema is a JSON object: { … }."),
        ("Stop strings", "\n".join("abcdefghijklmnopq"), "At most 16 stop strings."),
        ("Repetition penalty", "0", "Value must be greater than or equal to 0.01."),
        ("Min-p", "2", "Value must be less than or equal to 1."),
    ],
)
def test_what_the_server_would_refuse_is_not_sent(page, say, label, value, complaint):
    say("Yes.")
    open_settings(page)
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    expect(field).to_have_accessible_description(re.compile(f"^{re.escape(complaint)}"))
    button(page, "Done").click()
    expect(field).to_have_value("")
    bodies = requests_of(page)
    send_and_wait(page, "Ready?")
    assert bodies[0].keys().isdisjoint({"stop", "response_format", "repetition_penalty", "min_p"})


def test_the_answer_says_when_max_tokens_cut_it_off(page, say):
    say("A long story")
    open_settings(page)
    page.get_by_label("Max tokens", exact=True).fill("6")
    button(page, "Done").click()
    send_and_wait(page, "A story, please.")
    expect(answer(page)).to_have_text("A long")
    expect(page.get_by_text("Cut off at max tokens · 6 tokens")).to_be_visible()


def test_clear_everything(page, say):
    say("Here.")
    send_and_wait(page, "Are you there?")
    open_settings(page)
    page.get_by_label("Seed", exact=True).fill("5")
    page.once("dialog", lambda dialog: dialog.accept())
    button(page, "Clear everything").click()
    expect(turns(page)).to_have_count(0)
    expect(history(page).get_by_role("link")).to_have_count(0)
    page.reload()
    expect(turns(page)).to_have_count(0)
    expect(page.get_by_label("Seed", exact=True)).to_have_value("")
    assert page.evaluate("localStorage.length") == 0
