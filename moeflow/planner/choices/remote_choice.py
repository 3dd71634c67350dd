"""Whether experts that do not fit into memory are also kept by other machines, from the rates of links and disk.

Asks lenders for their free memory, and measures the links to them. One that does not answer now may do so later.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.address import format_address, parse_address
from moeflow.core.engine_config import ExpertSlotsConfig, LenderConfig, RemoteExpertsConfig
from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.hardware import DISK, RAM, Machine
from moeflow.core.units import format_bytes, format_seconds
from moeflow.experts.slot_arena import num_slots_in
from moeflow.kernels.on_demand import on_demand
from moeflow.parallel.remote.lending import Borrowing
from moeflow.parallel.tcp.cluster_token import default_token_file, read_token
from moeflow.parallel.tcp.conversation import RefusedError
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.disk_waits import DiskRates
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.experts.remote import borrowing as lenders_memory

logger = logging.getLogger(__name__)

_NAME: Final = "remote_experts"  # of the reason
_MEMORY_BYTES_PER_S: Final = 8e9  # of a lender's core that reads experts: assumed until it has computed


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChoice:
    """The decision and its reason."""

    config: RemoteExpertsConfig | None  # None: experts without a slot are on disk alone
    reason: str


def with_lenders(
    settings: Settings,
    slots: ExpertSlotsConfig,
    borrowing: Borrowing,
    machine: Machine | None,
    reasons: Reasons,
) -> ExpertSlotsConfig:
    """Return the slots and who else has experts, of the lenders that the user names. See `choose_remote`.

    `machine` None: the disk's speed is not known.
    """
    has_disk = machine is not None and machine.has(DISK)
    rates = DiskRates(link=machine.link(DISK, RAM), expert_bytes=slots.slab_bytes) if machine and has_disk else None
    remote = choose_remote(settings, slots, borrowing, rates)
    reasons.append((_NAME, remote.reason))
    return replace(slots, remote=remote.config)


def choose_remote(
    settings: Settings, slots: ExpertSlotsConfig, borrowing: Borrowing, disk: DiskRates | None
) -> RemoteChoice:
    """Return which of the lenders are used that the user names. `disk` None: its speed is not known.

    Blocks: about a second for each lender, some if one does not answer.
    Raises: ConfigError if it is no address, if there is no token, or if a lender refuses what no other try changes.
    """
    assert settings.remote_experts is not None, "lenders are named"
    addresses = [parse_address(text.strip()) for text in settings.remote_experts.split(",")]
    token_file = (settings.cluster_token_file or default_token_file(settings.cache_dir)).absolute()
    token = read_token(token_file)
    lenders = tuple(_asked(address, token, borrowing, slots) for address in addresses)
    config = RemoteExpertsConfig(lenders=lenders, token_file=str(token_file))
    return _judged(config, slots, borrowing, disk)


def _asked(address: tuple[str, int], token: bytes, borrowing: Borrowing, slots: ExpertSlotsConfig) -> LenderConfig:
    """Return a lender with the measured values. Raises: ConfigError."""
    host, port = address
    try:
        free_bytes, rates = lenders_memory.probe_lender(address, token, borrowing)
    except RefusedError as error:
        raise ConfigError(f"{format_address(host, port)} lends nothing (--remote-experts): {error}") from None
    except GroupError as error:
        logger.warning("%s; it is tried again while serving (--remote-experts)", error)
        return LenderConfig(host=host, port=port)
    return LenderConfig(
        host=host,
        port=port,
        num_experts=num_slots_in(free_bytes, slots.slab_bytes),
        round_trip_s=rates.round_trip_s,
        bytes_per_s=rates.bytes_per_s,
    )


def _judged(
    config: RemoteExpertsConfig, slots: ExpertSlotsConfig, borrowing: Borrowing, disk: DiskRates | None
) -> RemoteChoice:
    """Report what lenders bring, and omit lenders that would be slower than the disk."""
    answered = [it for it in config.lenders if it.num_experts]
    if not answered:
        return RemoteChoice(config=config, reason="no lender has answered yet: experts come from disk until one does")
    number = min(sum(it.num_experts for it in config.lenders), borrowing.num_layers * borrowing.num_experts)
    links = ", ".join(
        f"{format_address(it.host, it.port)} with a round trip of {format_seconds(it.round_trip_s)} and "
        f"{format_bytes(int(it.bytes_per_s))}/s"
        for it in answered
    )
    if disk is None or disk.link is None:
        return RemoteChoice(config=config, reason=f"{number} experts fit at {links}; the faster one computes")
    remote_s, disk_s = min(_expert_s(it, borrowing.hidden, slots.slab_bytes) for it in answered), disk.read_s(1)
    both = f"an expert that one token needs takes {format_seconds(remote_s)} there, {format_seconds(disk_s)} from disk"
    if remote_s >= disk_s:
        return RemoteChoice(config=None, reason=f"not used: {both} ({links})")
    return RemoteChoice(config=config, reason=f"{number} experts fit at {links}: {both}")


def _expert_s(lender: LenderConfig, hidden: int, slab_bytes: int) -> float:
    """Return the seconds of an expert that one token needs: messages both ways, and computing there."""
    return lender.round_trip_s + 2 * 4 * hidden / lender.bytes_per_s + slab_bytes / _MEMORY_BYTES_PER_S
