"""Run a lender of memory for experts: listen, lend and compute until the process is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from moeflow.core.address import format_address
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.units import format_bytes
from moeflow.experts.remote.lender import Lender
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.planner.hardware.host import host_resources

OnNews = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LendSettings:
    """What the user of a machine that lends memory has set."""

    host: str  # an address of this machine
    port: int
    token: bytes
    memory_bytes: int
    num_threads: int | None = None  # None: one a core
    cpu_isa: str = ""  # the best instruction set to use; empty: the best there is


def lend(settings: LendSettings, on_news: OnNews) -> None:
    """Lend until the process is stopped; `on_news` gets each change, in words.

    Raises: ConfigError if this machine cannot compute or listen; CapacityError if it does not have that much memory.
    """
    if not extension.is_available():
        raise ConfigError(f"a lender needs the CPU extension: {extension.why_not()}")
    resources = host_resources()
    if settings.memory_bytes > resources.available_bytes:
        raise CapacityError(
            f"{format_bytes(settings.memory_bytes)} are to be lent (--memory), and "
            f"{format_bytes(resources.available_bytes)} are free on this machine: lend less"
        )
    torch.set_num_threads(1)
    lender = Lender(
        settings.memory_bytes,
        num_threads=settings.num_threads or resources.num_cores,
        cpu_isa=settings.cpu_isa,
        on_news=on_news,
    )
    with closing(lender), closing(Endpoint(settings.token)) as endpoint:
        port = endpoint.listen(settings.host, settings.port, lender.take_in)
        on_news(f"lending {format_bytes(settings.memory_bytes)} at {format_address(settings.host, port)}")
        threading.Event().wait()
