"""The processes of one engine's ranks, each at a place of its own, as one `EngineHost`.

Each gets the engine's configuration with its number and the addresses of all. They meet without further messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from moeflow.core.address import Address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.parallel_config import RankLinks
from moeflow.processes.deaths import Death
from moeflow.processes.engine_host import EngineHost
from moeflow.processes.nodes.rank_port import RankPort

_TOGETHER_S = 2.0  # within which ranks notice the end of another one
_SECRET_BYTES = 32


class RanksHost:
    """See `EngineHost`. The process of the first rank has the engine."""

    def __init__(
        self, hosts: Sequence[EngineHost], addresses: Sequence[Sequence[Address]], port: RankPort | None = None
    ) -> None:
        """`addresses` has a row for each rank: those of all, as its machine knows them. `port` is the first rank's if
        it runs on this machine; it closes with the processes.
        """
        self._first, self._hosts = hosts[0], hosts
        self._addresses = addresses
        self._port = port
        self._has_config = False

    @property
    def name(self) -> str:
        """See `EngineHost`: the first rank's machine."""
        return self._first.name

    @property
    def is_running(self) -> bool:
        """See `EngineHost`."""
        return all(host.is_running for host in self._hosts)

    @property
    def problem(self) -> str:
        """See `EngineHost`."""
        return next((problem for host in self._hosts if (problem := host.problem)), "")

    @property
    def is_leaving(self) -> bool:
        """See `EngineHost`."""
        return any(host.is_leaving for host in self._hosts)

    @property
    def activity(self) -> str:
        """See `EngineHost`: of the first busy rank. The others wait for it."""
        if activity := self._first.activity:
            return activity
        others = enumerate(self._hosts[1:], start=1)
        return next((f"rank {rank} on {it.name}: {it.activity}" for rank, it in others if it.activity), "")

    def send(self, message: bytes) -> None:
        """See `EngineHost`. The first message is an `EngineConfig`."""
        if self._has_config:
            self._first.send(message)
            return
        self._has_config = True
        config, secret = msgspec.msgpack.decode(message, type=EngineConfig), secrets.token_bytes(_SECRET_BYTES)
        assert config.parallel is not None
        for rank, (host, known) in enumerate(zip(self._hosts, self._addresses, strict=True)):
            links = RankLinks(rank=rank, addresses=tuple(known), secret=secret)
            parallel = dataclasses.replace(config.parallel, links=links)
            host.send(msgspec.msgpack.encode(dataclasses.replace(config, parallel=parallel)))

    async def receive(self) -> bytes:
        """See `EngineHost`."""
        return await self._first.receive()

    def look(self) -> int:
        """See `EngineHost`."""
        beats = [host.look() for host in self._hosts]  # each must be looked at
        return beats[0]

    def in_pass(self) -> Mapping[str, int]:
        """See `EngineHost`."""
        return self._first.in_pass()

    async def wait(self) -> Death | None:
        """See `EngineHost`. One rank's end is the end of all."""
        waiting = [asyncio.ensure_future(host.wait()) for host in self._hosts]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waiting, timeout=_TOGETHER_S)
            deaths = {rank: end.result() for rank, end in enumerate(waiting) if end.done()}
        finally:
            for end in waiting:
                end.cancel()
        self.kill()
        return self._cause(deaths)

    def kill(self) -> None:
        """See `EngineHost`."""
        for host in self._hosts:
            host.kill()

    async def close(self) -> None:
        """See `EngineHost`."""
        await asyncio.gather(*(host.close() for host in self._hosts))
        if self._port is not None:
            self._port.close()

    def _cause(self, deaths: Mapping[int, Death | None]) -> Death | None:
        """Return the first cause of these ends by rank. A rank that ends because another one has reports no error."""
        for rank, death in deaths.items():
            if rank and death is not None:
                reason = f"rank {rank} on {self._hosts[rank].name}: {death.reason}"
                return Death(reason, is_from_outside=death.is_from_outside, in_pass=self.in_pass())
        if 0 in deaths:
            return deaths[0]
        return Death("a rank has ended", is_from_outside=True)
