"""Orders to the process that speaks to Ray, for which another one stands in."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import JoinConfig, NodeReplicas, RayConfig
from moeflow.planner.resolve import resolve
from moeflow.processes.cluster import ray_launcher
from moeflow.processes.cluster.node_engines import start_places
from moeflow.processes.cluster.ray_launcher import RayLauncher
from moeflow.processes.cluster.ray_messages import KeeperOrder, KeeperRefused, LaunchOrder
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral

# Reads a connection, an order and a further one; the report on the last has the number of its engines.
STAND_IN = """
import json, sys
def say(**what):
    print(json.dumps(what), flush=True)
sys.stdin.readline()
say(type="connected", own_address="10.0.0.1")
order = json.loads(sys.stdin.readline())
say(type="placed", nodes=[])
say(type="lost", address="10.0.0.2")
more = json.loads(sys.stdin.readline())
say(type="progress", text=f"{order['num_engines']} and {more['number']}")
sys.stdin.read()
"""


def test_a_start_fails_when_no_node_can_have_an_engine():
    async def body() -> None:
        launcher = RayLauncher("auto", lambda own_address: None, lambda address: None)
        launcher._num_needed = 2
        starting = asyncio.create_task(launcher.unless_refused(asyncio.Event().wait()))
        for reason, number in (("no checkpoint", 0), ("another checkpoint", 0), ("no checkpoint", 1)):
            await asyncio.sleep(0)
            assert not starting.done()
            launcher._take(KeeperRefused(reason, number))
        with pytest.raises(ConfigError, match="no checkpoint"):
            await starting

    asyncio.run(body())


def test_further_engines_before_the_order_are_part_of_it(monkeypatch, caplog):
    monkeypatch.setattr(ray_launcher, "_MAIN", STAND_IN)
    number = 3
    lost: list[str] = []

    def order_at(own_address: str) -> LaunchOrder:
        assert own_address == "10.0.0.1"
        return LaunchOrder(number, 1, "spread", False, 1.0, KeeperOrder("", 1, "", 1))

    async def body() -> None:
        nonlocal number
        launcher = RayLauncher("auto", order_at, lost.append)
        launching = asyncio.create_task(launcher._launch())
        while launcher._process is None:
            await asyncio.sleep(0)
        number += 2
        launcher.start_more(2)
        await launching
        launcher.start_more(0)
        launcher.start_more(4)
        assert launcher._process is not None
        for _ in range(2):
            report = await launcher._next_report(launcher._process)
            assert report is not None
            launcher._take(report)
        await launcher.close()
        launcher.start_more(1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "5 and 4" in caplog.text
    assert lost == ["10.0.0.2"]


@pytest.mark.parametrize(
    ("listening", "reached"), [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")]
)
def test_keepers_get_an_address_that_they_can_reach(tmp_path, monkeypatch, listening, reached):
    write_tiny_mixtral(tmp_path)
    config = resolve(Settings(model=str(tmp_path), cache_dir=tmp_path, num_threads=1)).config
    join = JoinConfig(host=listening, port=0, token_file=str(tmp_path / "token"), ray=RayConfig(address="auto"))
    orders: list[LaunchOrder] = []

    async def start(address, order_at, on_node_lost):
        orders.extend(order_at("127.0.0.1") for _ in range(2))

    async def body() -> None:
        places, _ = await start_places(config, NodeReplicas(number=2, most=2, join=join))
        assert places.add_keepers(3) == 3
        await asyncio.sleep(0)
        places.close()

    monkeypatch.setattr(RayLauncher, "start", start)
    asyncio.run(body())
    first, second = orders
    assert first == second  # of a Ray that comes back
    assert (first.keeper.host, first.num_engines) == (reached, 2)
    assert first.keeper.port > 0
