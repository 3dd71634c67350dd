"""A process that Ray starts on a node, with its order on one pipe and its reports on another: a rank, as `moeflow join`
starts it, or the keeper of an engine.

The token comes over the pipe, too, so that it is neither among a process's arguments nor in a file.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

import msgspec

from moeflow.core.errors import MoeflowError
from moeflow.engine.ranks.join import JoinSettings, LeftError, join
from moeflow.engine.ranks.orphan_watch import OrphanWatch
from moeflow.processes.cluster.ray_messages import RankEnd, RankMessage, RankNews, RankOrder
from moeflow.processes.nodes.keeper import ReleasedError, run_keeper


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder)
    watch = OrphanWatch(sys.stdin.buffer)
    try:
        _run(order, watch)
    except ReleasedError as error:
        _say(RankEnd(str(error), is_released=True))
    except LeftError as error:
        _say(RankEnd(str(error), has_left=True))
    except MoeflowError as error:
        _say(RankEnd(str(error), may_retry=False))
        raise SystemExit(1) from None
    except Exception as error:
        logging.getLogger(__name__).exception("the rank ends")
        _say(RankEnd(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _run(order: RankOrder, watch: OrphanWatch) -> NoReturn:
    """Raises: ConfigError, CheckpointError, CapacityError for what another try would not change."""
    token = bytes.fromhex(order.token)
    settings = JoinSettings(host=order.host, port=order.port, token=token, num_threads=order.num_threads)
    if order.keeps_engine:
        run_keeper(settings, _report, watch.computing)
    join(settings, _report, watch.computing)


def _report(text: str) -> None:
    _say(RankNews(text))


def _say(message: RankMessage) -> None:
    with suppress(BrokenPipeError):  # the reader is gone: see `OrphanWatch`
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
