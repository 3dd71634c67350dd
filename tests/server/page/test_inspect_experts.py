"""The view of experts: the map, the place of experts, tokens in the colours of their experts."""

from __future__ import annotations

import base64
import re

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from moeflow.core.engine_messages import EngineStats
from tests.packed import pack_beside
from tests.server.page.parts import button, retry_button, send, send_and_wait, set_max_tokens, turns
from tests.server.page.scripted_experts import ANSWER, PROMPT, Script
from tests.server.server_process import Server
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def script():
    return Script(num_layers=3, num_experts=4, top_k=2)


@pytest.fixture
def inspected(app, serve, open_page, script):
    """Open a page with the view of experts, which is answered by the script."""

    def inspected(**options):
        page = open_page(serve(app), **options)
        script.play(page)
        send_and_wait(page, "Why me?")
        button(page, "Inspect").click()
        return page

    return inspected


def view(page):
    return page.get_by_role("tabpanel", name="Experts")


def heat_map(page):
    return view(page).get_by_role("application")


def tooltip(page):
    return page.locator(".tooltip:visible")


def tokens(page):
    return view(page).get_by_role("listbox", name="Tokens").get_by_role("option")


def fact(page, term):
    """The detail beside a term."""
    return view(page).locator("dl.facts > div").filter(has=page.get_by_text(term, exact=True)).locator("dd")


def table(page):
    """The counts of the shown table, without the layers' numbers."""
    rows = view(page).get_by_role("region", name="Tokens of each expert").locator("tbody tr")
    expect(rows.first).to_be_visible()
    return [[int(text.replace(",", "")) for text in row.locator("td").all_inner_texts()] for row in rows.all()]


LOOKS = """all => all.map(({ dataset, style }) =>
  [dataset.expert, style.getPropertyValue("--first"), style.getPropertyValue("--second")])"""


def legend_colours(page):
    """The colour of each expert in the legend."""
    items = view(page).get_by_role("list", name="Experts of this layer").get_by_role("button").all()
    read = """(it) => [Number(it.dataset.expert), it.querySelector(".swatch").style.getPropertyValue("--first")]"""
    return dict(item.evaluate(read) for item in items)


def asks_for_experts(request):
    return "/stats/experts" in request.url


def violations(page):
    return {
        rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in Axe().run(page).response["violations"]
    }


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    """A server of a small model."""
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    write_tiny_mixtral(folder, num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=2)
    pack_beside(folder)
    server = Server(folder)
    with server.process:  # which closes its pipes
        try:
            yield server.wait_until_ready()
        finally:
            server.process.terminate()
            server.end()


def test_all_choices_of_a_real_model_are_shown(real_server, open_page):
    page = open_page(real_server.url, is_alone=True)
    button(page, "Inspect").click()
    expect(view(page).get_by_text("3 layers with 6 experts each.")).to_be_visible()
    set_max_tokens(page, "30")
    with page.expect_response("**/v1/chat/completions") as answered:
        send_and_wait(page, "Why me?")
    request_id = answered.value.headers["x-request-id"]
    expect(view(page).get_by_label("This conversation")).to_be_checked()
    view(page).get_by_text("as a table").click()

    told = httpx.get(f"{real_server.url}/stats/requests/{request_id}/tokens").json()
    experts = [it["experts"] for it in told["tokens"]]
    assert experts[-1] is None
    assert all(experts[:-1])
    routes = np.stack([np.frombuffer(base64.b64decode(it), "<u2").reshape(3, 2) for it in experts[:-1]])
    expected = [np.bincount(routes[:, row].ravel(), minlength=6).tolist() for row in range(3)]
    expect(view(page).get_by_text(f"{len(routes)} tokens made {len(routes) * 2 * 3} choices")).to_be_visible()
    assert table(page) == expected
    assert sum(map(sum, table(page))) == len(routes) * 2 * 3  # tokens x top-k x layers

    expect(tokens(page)).to_have_count(len(experts))
    slider = view(page).get_by_role("slider", name="Layer")
    for row in range(3):
        slider.fill(str(row))
        assert [look[0] for look in tokens(page).evaluate_all(LOOKS)[:-1]] == [str(it) for it in routes[:, row, 0]]

    send_and_wait(page, "And then?")  # both answers count
    view(page).get_by_role("radio", name="Since counting began").check()
    total = httpx.get(f"{real_server.url}/stats/experts").json()["total"]
    expect(view(page).get_by_text(f"{total['tokens']} tokens made")).to_be_visible()
    assert table(page) == total["counts"]
    view(page).get_by_role("radio", name="This conversation").check()
    assert table(page) == total["counts"]
    assert sum(map(sum, table(page))) == total["tokens"] * 2 * 3


def test_keys_reach_every_cell_and_choose_an_expert(inspected, script):
    page = inspected()
    heat_map(page).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    expect(tooltip(page)).to_contain_text("Layer 2, expert 1")
    share = script.counts()[1][1] / script.experts()["total"]["tokens"]
    expect(tooltip(page)).to_contain_text(f"{script.counts()[1][1]} tokens, {share:.0%} of them all")
    expect(tooltip(page)).to_contain_text("In: a slot of main memory")
    expect(tooltip(page)).to_contain_text("7 hits, 2 misses")
    expect(page.locator("#announcer")).to_contain_text("Layer 2, expert 1")
    page.keyboard.press("Enter")
    detail = view(page).locator(".expert-detail")
    expect(detail.get_by_role("heading", name="Layer 2, expert 1")).to_be_visible()
    expect(view(page).get_by_role("slider", name="Layer")).to_have_value("1")
    chosen = [place for place in range(1, len(PROMPT + ANSWER) - 1) if 1 in script.chosen(1, place)]
    marked = tokens(page).evaluate_all("all => all.flatMap((it, i) => (it.classList.contains('is-chosen') ? [i] : []))")
    assert marked == chosen
    assert violations(page) == {}
    expect(detail.get_by_role("listitem")).to_have_count(len({(PROMPT + ANSWER)[place] for place in chosen}))
    detail.get_by_role("button", name="Close").click()
    expect(detail).to_be_hidden()
    expect(view(page).locator(".tokens .is-chosen")).to_have_count(0)


def test_tokens_have_the_colours_of_their_experts(inspected, script):
    page = inspected()
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    slider = view(page).get_by_role("slider", name="Layer")
    for row, layer in enumerate(script.layers):
        if row:
            slider.press("ArrowRight")
        expect(slider).to_have_attribute("aria-valuetext", f"Layer {layer}")
        shown = tokens(page).evaluate_all(LOOKS)
        colours = legend_colours(page)
        for place, look in enumerate(shown):
            if place in (0, len(shown) - 1):
                assert look == ["", "transparent", "transparent"]
            else:
                first, second = script.chosen(row, place)
                assert look == [str(first), colours[first], colours[second]]
        assert len(set(colours.values())) == 3  # the fourth expert is idle
    assert tokens(page).evaluate_all("all => all.map((it) => it.classList.contains('is-template'))") == [
        it.startswith("<|") for it in PROMPT + ANSWER
    ]
    tokens(page).first.hover()
    expect(tooltip(page)).to_contain_text("Not computed: found in the prefix cache.")
    view(page).get_by_role("listbox", name="Tokens").focus()
    page.keyboard.press("End")
    expect(tooltip(page)).to_contain_text("Not computed: no token follows it.")
    page.keyboard.press("ArrowLeft")
    expect(tooltip(page)).to_contain_text(
        f"Layer 3: experts {', '.join(map(str, script.chosen(2, len(PROMPT + ANSWER) - 2)))}"
    )
    tokens(page).nth(2).click()  # tells all layers
    choices = view(page).locator(".token-choices li").all_inner_texts()
    told = [", ".join(map(str, script.chosen(row, 2))) for row in range(3)]
    assert choices == [f"Layer {layer}: experts {told[row]}" for row, layer in enumerate(script.layers)]
    assert (
        tokens(page).nth(2).evaluate("it => getComputedStyle(it, '::after').content") == f'"{script.chosen(2, 2)[0]}"'
    )


def test_tokens_come_while_an_answer_is_written(app, serve, open_page, script, say, go_on):
    page = open_page(serve(app))
    script.play(page)
    script.num_tokens = len(PROMPT) + 2
    say("Because so.", until="Because")
    send(page, "Why me?")
    button(page, "Inspect").click()
    expect(tokens(page)).to_have_count(len(PROMPT) + 2)
    last = tokens(page).last
    expect(last).to_have_class(re.compile("is-without"))
    page.evaluate("(it) => (globalThis.kept = it)", last.element_handle())
    script.num_tokens += 2
    expect(tokens(page)).to_have_count(len(PROMPT) + 4)
    kept = tokens(page).nth(len(PROMPT) + 1)
    assert kept.evaluate("(it) => it === kept")  # only new tokens are drawn
    expect(kept).not_to_have_class(re.compile("is-without"))  # it is computed by now
    script.num_tokens += 1
    go_on()
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    expect(retry_button(page)).to_be_visible()
    for _ in range(3):  # the second round may ask for the last tokens
        page.wait_for_event("request", asks_for_experts)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    for _ in range(2):
        page.wait_for_event("request", asks_for_experts)
    assert not any(url.endswith("/tokens") for url in requests)  # nothing new can come


def test_experts_from_disk_are_told_of_only_where_there_are_some(inspected, engine):
    page = inspected()
    expect(fact(page, "another machine")).to_have_text("2 experts (17%)")
    expect(fact(page, "Memory limit")).to_have_count(0)
    engine.snapshot = EngineStats(
        memory_limit_bytes=3 * 2**30,
        expert_slots=500,
        experts_in_slots=321,
        experts_on_disk=1920,
        is_prefetching=True,
        expert_hits_total=60,
        expert_late_total=5,
        expert_misses_total=35,
        expert_stall_s_total=1.26,
        expert_demand_bytes_total=2**30,
        expert_prefetched_bytes_total=2**29,
    )
    expected = {
        "Memory limit": "3.00 GiB",
        "In memory": "321 of 1920",
        "Found there": "60%",
        "Late: the read had begun": "5",
        "Misses": "35",
        "Waited for disk": "1.3 s",
        "Read": "1.50 GiB",
        "Read ahead": "on",
    }
    for term, text in expected.items():
        expect(fact(page, term)).to_contain_text(text)


def test_marked_text_stays_marked_while_numbers_come(inspected, script):
    page = inspected()
    expect(fact(page, "disk")).to_be_visible()
    heat_map(page).focus()
    page.keyboard.press("Enter")
    detail = view(page).locator(".expert-detail")
    for part in (detail.get_by_role("heading"), detail.locator("dd").first, fact(page, "disk")):
        part.evaluate("it => getSelection().setBaseAndExtent(it.firstChild, 0, it.firstChild, it.firstChild.length)")
        marked = part.inner_text()
        page.wait_for_timeout(1500)  # longer than the period of the view
        assert page.evaluate("getSelection().toString()") == marked


def test_one_of_several_replicas(inspected, script):
    idle = {"tokens": 0, "counts": [[0] * 4 for _ in range(3)]}
    on_disk = {"residency": [[3] * 4 for _ in range(3)], "hits": None, "misses": None}
    script.changes["replicas"] = [script.experts(), {**script.experts(), **on_disk, "total": idle}]
    page = inspected()
    view(page).get_by_role("radio", name="Since counting began").check()
    view(page).get_by_text("as a table").click()
    assert table(page) == script.counts()
    view(page).get_by_label("Replica").select_option("Replica 1")
    expect(fact(page, "disk")).to_have_text("12 experts (100%)")
    assert table(page) == idle["counts"]


def test_why_there_is_nothing_to_see(inspected, script):
    nothing = {"tokens": 0, "counts": [[0] * 4 for _ in range(3)]}
    some = {"last_minute": nothing, "num_encoder_layers": 1, "not_counted": "layers 4 to 5: other ranks have them"}
    script.changes = some
    page = inspected()
    expect(view(page).get_by_text("Not counted: layers 4 to 5: other ranks have them.")).to_be_visible()
    heat_map(page).focus()
    page.keyboard.press("Home")
    expect(tooltip(page)).to_contain_text("Layer E1, expert 0")  # of the encoder
    view(page).get_by_role("radio", name="Last minute").check()
    expect(view(page).get_by_text("No tokens were routed in this time.")).to_be_visible()
    expect(heat_map(page)).to_be_visible()
    script.changes = {"layers": [], "not_counted": "all choices: tokens are on several ranks"}
    expect(view(page).get_by_text("Not counted: all choices: tokens are on several ranks.")).to_be_visible()
    expect(heat_map(page)).to_be_hidden()
    script.changes = {"layers": [], "num_experts": 0, "not_counted": "all choices: it has no experts"}
    expect(view(page).get_by_text("scripted has no experts")).to_be_visible()
    assert not view(page).get_by_text("Not counted").is_visible()


def test_a_system_prompt_is_no_part_of_the_template(app, serve, open_page, script):
    page = open_page(serve(app))
    script.play(page)
    button(page, "Settings").click()
    page.get_by_label("System prompt", exact=True).fill(PROMPT[0])
    button(page, "Done").click()
    send_and_wait(page, "Why me?")
    button(page, "Inspect").click()
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    is_template = "all => all.map((it) => it.classList.contains('is-template'))"
    assert tokens(page).evaluate_all(is_template) == [it == "<|assistant|>" for it in PROMPT + ANSWER]


def test_an_answer_leads_to_its_experts(app, serve, open_page, script):
    page = open_page(serve(app))
    script.play(page)
    send_and_wait(page, "Why me?")
    send_and_wait(page, "Why you?")
    turns(page).first.get_by_role("button", name="Which experts?").click()
    expect(view(page).get_by_role("heading", name="Tokens coloured by expert")).to_be_in_viewport()
    expect(view(page).get_by_label("Answer", exact=True).locator("option:checked")).to_have_text("1. Why me?")
    expect(view(page).get_by_role("radio", name="Shown answer")).to_be_checked()
    expect(view(page).locator(".experts-body > .hint")).to_contain_text("8 tokens made 48 choices")
    view(page).get_by_text("as a table").click()
    assert table(page) == script.counts()
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))


def test_answers_of_another_model_are_left_out(inspected, script):
    script.changes = {"counted_s": 670.0}
    page = inspected()
    conversation_note = view(page).locator(".experts-body > .hint")
    expect(conversation_note).to_contain_text("8 tokens made")
    expect(conversation_note).not_to_contain_text("Counting began")  # answers may be older, of another process
    heat_map(page).focus()
    for key in ("Home", "PageDown", "End"):
        page.keyboard.press(key)
    expect(tooltip(page)).to_contain_text("Layer 3, expert 3")
    script.model, script.layers, script.num_experts = "smaller", [1, 2], 3
    expect(view(page).get_by_text("2 layers with 3 experts each.")).to_be_visible()
    expect(conversation_note).to_contain_text("8 tokens made")  # since counting began
    expect(conversation_note).to_contain_text("Counting began 11 min ago.")
    expect(tooltip(page)).to_have_count(0)
    view(page).get_by_role("radio", name="This conversation").check()
    expect(conversation_note).to_have_text("Answers of other models are left out: 1.")
    send_and_wait(page, "And you?")
    view(page).get_by_text("as a table").click()
    expect(conversation_note).to_contain_text("Answers of other models are left out: 1.")
    expect(conversation_note).to_contain_text("8 tokens made 32 choices")
    assert table(page) == script.counts()
    expect(page.locator(".inspect-problem")).to_be_empty()


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, PHONE], ids=["dark", "phone"])
def test_axe_finds_nothing(inspected, options):
    page = inspected(reduced_motion="reduce", **options)
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    view(page).get_by_text("as a table").click()
    view(page).get_by_text("Every layer").first.click()
    heat_map(page).focus()
    page.keyboard.press("Enter")
    tokens(page).nth(2).click()
    expect(tooltip(page)).to_be_visible()
    assert violations(page) == {}


def test_a_tapped_cell_shows_its_expert_on_a_phone(inspected):
    page = inspected(**PHONE)
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    heat_map(page).tap(position={"x": 8, "y": 24})
    expect(view(page).get_by_role("heading", name="Layer 1, expert 0")).to_be_in_viewport()


def test_a_large_model_fits_a_phone(inspected, script):
    script.__init__(num_layers=60, num_experts=256, top_k=8)
    page = inspected(**PHONE)
    expect(tokens(page)).to_have_count(len(PROMPT + ANSWER))
    assert view(page).evaluate("it => it.scrollWidth - it.clientWidth") == 0
    scroll = heat_map(page).locator("..")
    assert scroll.evaluate("it => it.scrollWidth > it.clientWidth")  # cells are large enough to be hit
    heat_map(page).focus()
    for key in ("ArrowRight", "End", "PageDown"):
        page.keyboard.press(key)
    expect(tooltip(page)).to_contain_text("Layer 60, expert 255")
    assert scroll.evaluate("it => it.scrollLeft + it.clientWidth >= it.scrollWidth - 1")


CELL = """(canvas) => {
  const copy = new OffscreenCanvas(1, 1).getContext("2d");
  copy.drawImage(canvas, -8, -24); // a pixel of the first cell
  return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}"""


def test_the_map_has_the_colours_of_the_theme_and_of_paper(inspected):
    page = inspected(color_scheme="light")
    expect(heat_map(page)).to_be_visible()
    light = heat_map(page).evaluate(CELL)
    page.emulate_media(color_scheme="dark")
    dark = heat_map(page).evaluate(CELL)
    assert sum(dark) > sum(light)  # an expert with many tokens stands out from the page
    page.emulate_media(media="print")
    assert heat_map(page).evaluate(CELL) == light
    expect(button(page, "Play")).to_be_hidden()
