"""Does the page stay smooth while a long answer streams into it?

    python -m studies.page_streaming                        10,000 tokens, 200 a second
    python -m studies.page_streaming --rate 1000 --phone    faster, on a processor slowed down four times
    python -m studies.page_streaming --out docs/studies/results/page_streaming.jsonl

Serves the page itself, its policy included, beside an endpoint that streams an answer made of headings, paragraphs,
lists, tables, code and formulas; a token is four characters. In headless Chromium it records the time between frames
(requestAnimationFrame) and the browser's own long tasks (over 50 ms), and shows them for each quarter of the stream:
what grows with the answer shows as a worse last quarter. `busy` is the share of time that the page's thread worked, of
which scripts, styles and layout are told apart; it depends less on what else the machine does than frames do.

Wants Chromium and playwright, and a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Page, sync_playwright
from starlette.responses import StreamingResponse

from moeflow.bench.metrics import percentile
from moeflow.cli.bench.output import result_options
from moeflow.server.page import add_page
from studies.browser import MISSING, find_browser, launch
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.page_streaming_table import FRAME_MS, table

TOKEN_CHARS = 4
MODEL = {
    "name": "stream",
    "model_type": "stream",
    "created": 1,
    "num_parameters": 1e9,
    "num_active_parameters": 1e9,
    "num_experts": 0,
    "num_layers": 1,
    "weight_format": "bfloat16",
    "device": "cpu",
    "speculators": [],
    "max_model_len": 131_072,
    "kv_capacity_tokens": 131_072,
}
STATS = {"model": MODEL, "num_running": 1, "num_waiting": 0, "kv_blocks_total": 0, "replicas": [], "expert_slots": 0}


def parts() -> Iterator[str]:
    """Yield what answers are made of, each part longer than a screen now and then."""
    sentence = "The router sends each token through **two** of its experts, as in `route(x)`, and $p_i$ weighs them. "
    for number in range(1_000_000):
        yield f"## Part {number}\n\n" + sentence * 5 + "\n\n" + sentence * 3 + "\n\n"
        yield "".join(f"{i}. Item {i} with *some* words\n   - and one below it\n" for i in range(1, 13)) + "\n"
        rows = "".join(
            f"| expert {i} | {i * 7 % 13} | {i * 0.37:.2f} | `w{i}` |\n" for i in range(60 if number % 2 else 8)
        )
        yield "| Expert | Tokens | Share | Name |\n| :-- | --: | --: | :-: |\n" + rows + "\n"
        line = (
            'def f{0}(x: int) -> str:  # number {0}\n    """Say it."""\n    return f"{{x}}" if x > {0} else "none"\n\n'
        )
        yield "```python\n" + "".join(line.format(i) for i in range(50 if number % 2 else 5)) + "```\n\n"
        yield "$$\n\\sum_{i=1}^{n} \\frac{e^{x_i}}{\\sum_j e^{x_j}} = 1\n$$\n\n> A remark, quoted.\n\n"


def made_text(num_tokens: int) -> str:
    """Return an answer of so many tokens."""
    text = ""
    for part in parts():
        text += part
        if len(text) >= num_tokens * TOKEN_CHARS:
            return text[: num_tokens * TOKEN_CHARS]
    raise AssertionError("parts() goes on for longer than any answer")


def make_app(text: str, rate: float) -> FastAPI:
    """Return the page's server, which answers anything with the text, at so many tokens a second."""
    app = FastAPI()

    async def events() -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number, at in enumerate(range(0, len(text), TOKEN_CHARS)):
            await asyncio.sleep(max(0, start + number / rate - loop.time()))
            choice = {"index": 0, "delta": {"content": text[at : at + TOKEN_CHARS]}, "finish_reason": None}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/ready")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/stats")
    def stats() -> dict[str, Any]:
        return STATS

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL["name"]}]}

    @app.post("/tokenize")
    def tokenize() -> dict[str, Any]:
        return {"tokens": [], "count": 0, "max_model_len": MODEL["max_model_len"]}  # for the meter of the context

    @app.post("/v1/chat/completions")
    def complete() -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    add_page(app)
    return app


RECORD = """() => {
  window.frames = [];
  window.longTasks = [];
  new PerformanceObserver(list => window.longTasks.push(...list.getEntries().map(it => [it.startTime, it.duration])))
    .observe({ type: "longtask" });
  const tick = time => { window.frames.push(time); requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""


@dataclass
class Work:
    """What the page's thread has done so far, in seconds, by the browser's count."""

    at_s: float
    busy_s: float
    script_s: float
    style_s: float
    layout_s: float
    num_nodes: float

    @classmethod
    def read(cls, session: Any) -> Work:
        """Ask the browser."""
        found = {it["name"]: it["value"] for it in session.send("Performance.getMetrics")["metrics"]}
        names = ("Timestamp", "TaskDuration", "ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "Nodes")
        return cls(*(found[name] for name in names))


def measure(page: Page, session: Any, stream_s: float) -> tuple[list[float], list[Work]]:
    """Ask once and follow the answer; return when each quarter of the time was over, in ms of the page's clock, and
    the work until then. Nothing inspects the page in between.
    """
    page.get_by_label("Your message").fill("Go on.")
    page.evaluate(RECORD)
    marks, work = [page.evaluate("performance.now()")], [Work.read(session)]
    page.keyboard.press("Enter")
    for quarter in range(4):
        page.wait_for_timeout(stream_s / 4 * 1000)
        if quarter == 3:  # it has ended by now, or is late
            page.get_by_role("button", name="Try again").wait_for(timeout=10 * stream_s * 1000)
        marks.append(page.evaluate("performance.now()"))
        work.append(Work.read(session))
    return marks, work


def quarters(page: Page, marks: list[float], work: list[Work]) -> list[dict[str, Any]]:
    """Return what each quarter of the stream looked like, and then all of it."""
    frames = page.evaluate("window.frames")
    long_tasks = page.evaluate("window.longTasks")
    spans = [*itertools.pairwise(range(5)), (0, 4)]
    return [
        {
            "name": "all" if (first, last) == (0, 4) else f"quarter {last}",
            **frame_figures(frames, marks[first], marks[last]),
            "long_tasks_ms": [length for at, length in long_tasks if marks[first] <= at <= marks[last]],
            **work_figures(work[first], work[last]),
        }
        for first, last in spans
    ]


def frame_figures(frames: list[float], start_ms: float, end_ms: float) -> dict[str, float]:
    """Return figures of the frames between two moments of the page's clock."""
    times = [time for time in frames if start_ms <= time <= end_ms]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "frames_per_s": len(gaps) / (end_ms - start_ms) * 1000,
        "median_ms": statistics.median(gaps),
        "p99_ms": percentile(gaps, 99),
        "worst_ms": max(gaps),
        "late_share": sum(gap > 1.5 * FRAME_MS for gap in gaps) / len(gaps),
    }


def work_figures(old: Work, new: Work) -> dict[str, float]:
    """Return the shares of the time between two counts that the page's thread worked, and the nodes there are."""
    wall_s = new.at_s - old.at_s
    parts = ("busy", "script", "style", "layout")
    shares = {f"{name}_share": (getattr(new, f"{name}_s") - getattr(old, f"{name}_s")) / wall_s for name in parts}
    return {"seconds": wall_s, **shares, "num_nodes": new.num_nodes}


@click.command(help=__doc__)
@click.option("--tokens", type=click.IntRange(1), default=10_000, show_default=True, help="Of the answer.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=200.0, show_default=True, help="Tokens/s.")
@click.option("--phone", "is_phone", is_flag=True, help="A small window, and a processor slowed down four times.")
@result_options
def main(tokens: int, rate: float, is_phone: bool, as_json: bool, out: Path | None) -> None:
    """Serve, and measure."""
    path = find_browser()
    if path is None:
        raise click.ClickException(MISSING)

    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(made_text(tokens), rate)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = launch(playwright, path)
            size = {"width": 390, "height": 800} if is_phone else {"width": 1280, "height": 900}
            page = browser.new_page(viewport=size)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            if is_phone:
                session.send("Emulation.setCPUThrottlingRate", {"rate": 4})
            page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            page.get_by_role("heading", name=str(MODEL["name"])).wait_for()
            found = quarters(page, *measure(page, session, tokens / rate))
            version = browser.version
            browser.close()
    finally:
        server.should_exit = True
        thread.join()
    publish(
        "page_streaming",
        table,
        out,
        as_json=as_json,
        browser=version,
        num_tokens=tokens,
        rate=rate,
        is_phone=is_phone,
        quarters=found,
    )


if __name__ == "__main__":
    run_study(main)
