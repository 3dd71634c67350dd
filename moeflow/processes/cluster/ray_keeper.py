"""A keeper that Ray starts on a node, with its order on one pipe and its reports on another.

The token comes over the pipe, too, so that it is neither among a process's arguments nor in a file.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

import msgspec

from moeflow.core.errors import MoeflowError
from moeflow.processes.cluster.orphan_watch import OrphanWatch
from moeflow.processes.cluster.ray_messages import KeeperEnd, KeeperMessage, KeeperNews, KeeperOrder
from moeflow.processes.nodes.join_settings import JoinSettings, LeftError
from moeflow.processes.nodes.keeper import ReleasedError, run_keeper


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperOrder)
    settings = JoinSettings(
        host=order.host,
        port=order.port,
        token=bytes.fromhex(order.token),
        num_threads=order.num_threads,
        group=order.group,
    )
    watch = OrphanWatch(sys.stdin.buffer)
    try:
        run_keeper(settings, _report, watch.computing)
    except ReleasedError as error:
        _say(KeeperEnd(str(error), is_released=True))
    except LeftError as error:
        _say(KeeperEnd(str(error), has_left=True))
    except MoeflowError as error:
        _say(KeeperEnd(str(error), may_retry=False))
        raise SystemExit(1) from None
    except Exception as error:
        logging.getLogger(__name__).exception("the keeper ends")
        _say(KeeperEnd(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _report(text: str) -> None:
    _say(KeeperNews(text))


def _say(message: KeeperMessage) -> None:
    with suppress(BrokenPipeError):  # the reader is gone: see `OrphanWatch`
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
