"""Advice is worked out once, by another process, and only while no engine computes."""

from __future__ import annotations

import asyncio
import dataclasses

import psutil
import pytest

from moeflow.server.speed import advice_run
from moeflow.server.speed.advice_run import AdviceRun
from tests.server.speed.planned import planned

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(plan, monkeypatch, tmp_path):
    """Return a run of advice on a model of this name. `is_idle` tells whether it may go on."""
    monkeypatch.setattr(advice_run, "_MODULE", "tests.server.speed.scripted_advice")

    def make(name, is_idle=lambda: True):
        config = dataclasses.replace(plan.config, model_path=str(tmp_path / name))
        return AdviceRun(dataclasses.replace(plan, config=config), is_idle)

    return make


async def ended(run):
    await asyncio.wait_for(run._working, 20)


async def test_it_is_worked_out_once(make):
    run = make("tiny")
    assert (run.found, run.why_not) == (None, "worked out once the server is idle")
    run.ask()
    assert run.why_not == "being worked out"
    await ended(run)
    assert [(it.change, it.speedup_alone) for it in run.found] == [("more of it", 2.0)]
    assert run.why_not == ""
    before = run._working
    run.ask()
    assert run._working is before


async def test_it_waits_for_an_idle_server(make):
    run = make("tiny", lambda: False)
    run.ask()
    assert run._working is None
    assert run.why_not == "worked out once the server is idle"


async def test_work_of_the_engine_ends_it_and_it_begins_again(make):
    idle = [True]
    run = make("slow", lambda: idle[0])
    before = set(psutil.Process().children())
    run.ask()
    while not set(psutil.Process().children()) - before:
        await asyncio.sleep(0.01)
    idle[0] = False
    await ended(run)
    assert set(psutil.Process().children()) <= before
    assert (run.found, run.why_not) == (None, "worked out once the server is idle")
    idle[0] = True
    run.ask()
    assert run.why_not == "being worked out"
    await run.close()
    assert set(psutil.Process().children()) <= before


async def test_the_end_of_the_server_ends_it(make, plan, make_app):
    service, before = make_app().state.service, set(psutil.Process().children())
    model = service.models.only
    model.plan = plan
    known = service.speed_of(model)
    known.advice = make("slow")
    known.advice.ask()
    while not set(psutil.Process().children()) - before:
        await asyncio.sleep(0.01)
    await service.close()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(("name", "why"), [("too large", "it does not fit"), ("broken", "it could not be worked out")])
async def test_a_failure_is_the_reason(make, name, why):
    run = make(name)
    run.ask()
    await ended(run)
    assert (run.found, run.why_not) == (None, why)
