"""The views of jobs, models, machines and the log show the server's state, and change it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
from playwright.sync_api import expect

from moeflow.core.engine_messages import EngineStats, LenderStats, RankStats
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.log_ring import LogRing
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.server.fleet import make_fleet
from tests.server.jobs.requests import chat_line, read_lines, write_lines
from tests.server.live_server import eventually
from tests.server.page.parts import button
from tests.server.page.test_accessibility import violations
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.browser, pytest.mark.slow]

REPO = "tiny/Mixtral"
DROP = """(target, text) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], "wrong.jsonl"));
  target.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def ring(monkeypatch) -> LogRing:
    ring = LogRing()
    monkeypatch.setattr("moeflow.server.api.server_log.log_ring", lambda: ring)
    return ring


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("moeflow.server.downloads.hub_cache", lambda: tmp_path / "none")


@pytest.fixture
def jobs(app, tmp_path) -> Iterator[Jobs]:
    app.state.jobs = Jobs(tmp_path / "jobs", app.state.service)
    yield app.state.jobs
    app.state.jobs._lock.close()


def view(page, name):
    """Open a view, and return it."""
    if not page.get_by_role("tab", name=name, exact=True).is_visible():
        button(page, "Inspect").click()
    page.get_by_role("tab", name=name, exact=True).click()
    return page.get_by_role("tabpanel", name=name, exact=True)


def row(shown, name):
    return shown.get_by_role("listitem").filter(has_text=name)


def use_key(page, key="k"):
    page.get_by_label("API key").fill(key)
    button(page, "Use key").click()
    expect(page.get_by_label("API key")).to_be_hidden()


def write(ring, text, level=logging.INFO, **fields):
    record = logging.LogRecord("moeflow.test", level, "", 0, text, None, None)
    record.fields = fields
    ring.handle(record)


def test_a_job_from_its_file_to_its_answers(page, jobs, say, tmp_path):
    say("Yes.")
    shown = view(page, "Jobs")
    expect(shown.get_by_text("There are no jobs yet.")).to_be_visible()
    lines = [chat_line(f"q{number}") for number in range(3)]
    file = write_lines(tmp_path / "three.jsonl", *lines, chat_line("bad", max_tokens=-7))
    shown.get_by_label("Drop a .jsonl file here, or choose one").set_input_files(file)
    expect(shown.get_by_label("Name")).to_have_value("three")
    shown.get_by_label("Name").fill("My questions")
    button(shown, "Start").click()
    job = row(shown, "My questions")
    expect(job).to_contain_text("completed")
    expect(job).to_contain_text("4 of 4 requests done · 1 failed · 15 tokens generated")
    bar = job.get_by_role("progressbar", name="Progress of My questions")
    expect(bar).to_have_attribute("aria-valuenow", "100")
    widths = bar.evaluate("it => [...it.children].map((part) => part.style.width)")
    assert widths == ["75%", "25%"]
    job.get_by_text("Failed requests").click()
    expect(job).to_contain_text("bad: max_tokens: Input should be greater than or equal to 0")
    with page.expect_download() as download:
        button(job, "Download answers").click()
    download.value.save_as(tmp_path / "answers.jsonl")
    assert download.value.suggested_filename == "My questions.output.jsonl"
    assert [it["custom_id"] for it in read_lines(tmp_path / "answers.jsonl")] == ["q0", "q1", "q2"]
    assert jobs.batches.all()[0].metadata == {"name": "My questions"}

    shown.locator(".drop").evaluate(DROP, (chat_line("a") + b"\nno JSON").decode())
    expect(shown.get_by_label("Name")).to_have_value("wrong")
    button(shown, "Start").click()
    expect(row(shown, "wrong").first).to_contain_text("Line 2: the line is not valid JSON")


def test_a_server_without_a_place_for_files_offers_no_jobs(page):
    shown = view(page, "Jobs")
    refused = []
    page.on("response", lambda it: refused.append(it.url) if it.status == 503 else None)
    expect(shown.get_by_text("This server keeps no files")).to_be_visible()
    page.wait_for_timeout(1200)  # longer than the view's period
    assert len(refused) <= 1
    expect(shown.get_by_role("button", name="Start")).to_be_hidden()
    expect(shown.get_by_text("There are no jobs yet.")).to_be_hidden()


def test_a_running_job_is_measured_and_cancelled(page, jobs, say, engine, tmp_path):
    say("Yes, certainly.", until="Yes")
    shown = view(page, "Jobs")
    file = write_lines(tmp_path / "many.jsonl", *(chat_line(f"q{number}") for number in range(9)))
    shown.get_by_label("Drop a .jsonl file here, or choose one").set_input_files(file)
    button(shown, "Start").click()
    expect(row(shown, "many")).to_contain_text("0 of 9 requests done · time left: being measured")
    button(row(shown, "many"), "Cancel").click()
    expect(row(shown, "many").locator(".row-state")).to_have_text("cancelled")
    expect(button(row(shown, "many"), "Cancel")).to_be_hidden()
    assert jobs.batches.all()[0].status == "cancelled"


def test_a_job_speed_is_that_of_its_readings(page):
    found = page.evaluate(
        """async () => {
          const { JobSpeed } = await pageModule("inspect/jobs/job_speed.js");
          const speed = new JobSpeed();
          const found = [speed.tokensPerS, speed.leftS(10)];
          const note = (completed, failed, tokens, atMs) =>
            speed.note({ request_counts: { completed, failed }, usage: { output_tokens: tokens } }, atMs);
          note(4, 0, 1000, 0);
          note(4, 0, 1000, 1500);
          found.push(speed.tokensPerS, speed.leftS(10));
          note(6, 2, 3000, 4000);
          found.push(speed.tokensPerS, speed.leftS(10));
          for (let s = 5; s <= 60; s++) note(8, 2, 3000 + 100 * s, 1000 * s);
          return [...found, speed.tokensPerS, speed.readings.length];
        }"""
    )
    assert found == [None, None, None, None, 500, 10, 100, 32]


def test_without_a_key_the_reason_stands_in_the_place_of_buttons(page):
    shown = view(page, "Models")
    refusal = shown.get_by_text("Changes need an API key, which this server lacks")
    expect(refusal).to_contain_text("MOEFLOW_API_KEY=SECRET moeflow serve ...")
    expect(refusal.locator("code").first).to_have_text("MOEFLOW_API_KEY=SECRET moeflow serve ...")
    expect(row(shown, "fake-model")).to_contain_text("ready")
    expect(shown.get_by_role("button")).to_have_count(0)
    expect(shown.get_by_label("Name on Hugging Face")).to_be_hidden()
    shown = view(page, "Machines")
    expect(shown.get_by_text("The number of replicas cannot be changed")).to_be_visible()
    expect(shown.get_by_role("button")).to_have_count(0)


def test_the_focus_stays_in_the_inspector_and_returns(page):
    page.set_viewport_size({"width": 1400, "height": 800})
    button(page, "Inspect").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Experts")).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.set_viewport_size({"width": 700, "height": 800})  # as zoom does
    expect(page.locator("#inspector:modal")).to_be_visible()
    expect(page.get_by_role("tab", name="Time line")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button(page, "Inspect")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Time line")).to_be_focused()  # the view that was open


def test_what_only_a_key_may_read_is_explained(make_app, serve, open_page, listener):
    page = open_page(serve(make_app(root_path="/llm")))  # there is a proxy, so not only this machine may ask
    shown = view(page, "Models")
    expect(shown.get_by_text("To let other machines read this, the server needs an API key")).to_be_visible()
    expect(row(shown, "fake-model")).to_contain_text("ready")
    expect(shown.get_by_role("heading", name="Pull a model")).to_be_hidden()
    view(page, "Log")
    expect(page.locator(".inspect-problem")).to_contain_text("To let other machines read this")


def test_models_are_loaded_unloaded_and_pulled(tokenizer, serve, open_page, monkeypatch, tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    monkeypatch.setattr("moeflow.server.downloads.hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr("moeflow.server.pulls.hub_cache", lambda: tmp_path / "hub")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fleet = make_fleet(tokenizer, api_key="k")
    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # for the process that pulls
        hub.add_folder(REPO, tmp_path / "model")
        page = open_page(serve(fleet.app))
        use_key(page)
        shown = view(page, "Models")
        button(row(shown, "huge"), "Load").click()
        expect(button(row(shown, "huge"), "Unload")).to_be_visible()
        assert fleet.status["huge"] == "ready"
        button(row(shown, "huge"), "Unload").click()
        expect(row(shown, "huge")).to_contain_text(["not loaded", "loaded once"][0])
        assert fleet.status["huge"] == "unloaded"

        hub.chunk_bytes, hub.wait_s = 10_000, 0.1
        name = shown.get_by_label("Name on Hugging Face")
        name.fill("not a name")
        name.press("Enter")
        expect(shown.get_by_text("'not a name' is no model's name")).to_be_visible()
        name.fill(REPO)
        name.press("Enter")
        bar = shown.get_by_role("progressbar", name="Progress of the pull")
        expect(bar).to_be_visible()
        page.reload()  # the state is the server's
        expect(bar).to_be_visible()
        hub.wait_s = 0.0
        expect(shown.get_by_text(f"{REPO} is downloaded.")).to_be_visible()
        expect(shown.get_by_text("free on the disk")).to_be_visible()
        expect(row(shown, REPO)).to_have_count(2)  # served, and downloaded
        expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text([*fleet.status])


def test_machines_show_each_engine_and_rank(app, serve, open_page, engine):
    stats = EngineStats(num_running=3, tokens_per_second=41.4, kv_blocks_total=200, kv_blocks_used=50)
    engine.replica_statuses = [
        ReplicaStatus(EngineState.READY, stats),
        ReplicaStatus(EngineState.READY, msgspec.structs.replace(stats, num_running=1), host="b", is_slow=True),
        ReplicaStatus(EngineState.RESTARTING, EngineStats(), host="c", activity="pulling x/y: 40%"),
    ]
    engine.snapshot = EngineStats(
        ranks=[
            RankStats(first_layer=0, num_layers=2, busy_s_total=3.0, waited_s_total=1.0, num_experts=8),
            RankStats(host="b", first_layer=2, num_layers=2, busy_s_total=1.0, waited_s_total=3.0, is_slow=True),
        ],
        rank_imbalance=1.5,
        lenders=[LenderStats(address="d:7", state="lost: no answer", num_experts=5)],
    )
    page = open_page(serve(app))
    shown = view(page, "Machines")
    first = row(shown, "Replica 0")
    expect(first).to_contain_text("the server\u2019s machine · ready")
    expect(first).to_contain_text("3 running · 0 waiting · 41 tokens/s · KV cache 25%")
    expect(first.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "25")
    expect(row(shown, "Replica 1")).to_contain_text("b · slow: gets no new requests")
    expect(row(shown, "Replica 2")).to_contain_text("c · restarting")
    expect(row(shown, "Replica 2")).to_contain_text("pulling x/y: 40%")
    expect(row(shown, "Rank 0")).to_contain_text("layers 0 to 1 · 8 experts · busy 3.0 s · waited 1.0 s")
    expect(row(shown, "Rank 0")).to_contain_text("lately 75% busy, 25% waiting")
    expect(row(shown, "Rank 1")).to_contain_text("b · slow: the others wait for it")
    expect(shown.get_by_text("Imbalance 1.50")).to_be_visible()
    expect(row(shown, "d:7").first).to_contain_text("lost: no answer")
    hosts = shown.locator("section").filter(has=page.get_by_role("heading", name="Hosts"))
    expect(hosts.get_by_role("listitem")).to_have_text(
        [
            "the server\u2019s machine1 replica · 1 rank",
            "b1 replica · 1 rank",
            "c1 replica",
            "d:7lends memory for experts",
        ]
    )
    expect(shown.get_by_role("heading", name="HTTP processes")).to_be_hidden()


def test_the_log_is_followed_filtered_paused_and_copied(app, serve, open_page, ring):
    write(ring, "first line")
    write(ring, "it failed", logging.ERROR, status=500)
    write(ring, "request", path="/tokenize", status=200)  # of the page itself
    page = open_page(serve(app), permissions=["clipboard-read", "clipboard-write"])
    shown = view(page, "Log")
    lines = shown.locator("ol li")
    expect(lines).to_have_count(2)
    write(ring, "<b>third</b>")
    expect(lines.last).to_contain_text("INFO test: <b>third</b>")
    shown.get_by_label("Level").select_option("error")
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("ERROR test: it failed status=500")
    expect(shown.get_by_text("1 of 4 lines")).to_be_visible()
    button(shown, "Copy").click()
    assert eventually(
        lambda: " ERROR moeflow.test: it failed status=500" in page.evaluate("navigator.clipboard.readText()")
    )
    shown.get_by_label("Level").select_option("debug")
    shown.get_by_label("Routine requests of the page").check()
    expect(lines).to_have_count(4)
    shown.get_by_label("Routine requests of the page").uncheck()
    shown.get_by_label("Text").fill("THIRD")
    expect(lines).to_have_count(1)
    shown.get_by_label("Text").fill("")
    button(shown, "Pause").click()
    write(ring, "fourth")
    page.wait_for_timeout(1200)  # longer than its period
    expect(lines).to_have_count(3)
    button(shown, "Go on").click()
    expect(lines).to_have_count(4)
    for number in range(1100):
        write(ring, f"many {number}")
    expect(lines.last).to_contain_text("many 1099")
    expect(lines).to_have_count(1000)
    assert (
        page.evaluate("it => it.scrollHeight - it.scrollTop - it.clientHeight", shown.locator("..").element_handle())
        < 40
    )


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", **PHONE}], ids=["light", "dark phone"])
def test_axe_finds_nothing(app, serve, open_page, engine, jobs, ring, options):
    engine.snapshot = EngineStats(ranks=[RankStats(busy_s_total=3.0, waited_s_total=1.0)] * 2)
    write(ring, "it failed", logging.ERROR, status=500)
    page = open_page(serve(app), reduced_motion="reduce", **options)
    for name in ("Jobs", "Models", "Machines", "Log"):
        shown = view(page, name)
        expect(shown.get_by_role("heading").or_(shown.get_by_label("Level")).first).to_be_visible()
        page.wait_for_timeout(150)
        assert violations(page) == {}, name
        assert page.evaluate("it => it.scrollWidth - it.clientWidth", shown.locator("..").element_handle()) == 0
