"""A rank's process that Ray starts: `moeflow join` with its order on one pipe and its reports on another.

The token comes over the pipe, too, so that it is neither among a process's arguments nor in a file.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

import msgspec

from moeflow.core.errors import MoeflowError
from moeflow.engine.ranks.join import JoinSettings, join
from moeflow.engine.ranks.orphan_watch import OrphanWatch
from moeflow.processes.cluster.ray_messages import RankEnd, RankMessage, RankNews, RankOrder


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder)
    watch = OrphanWatch(sys.stdin.buffer)
    settings = JoinSettings(
        host=order.host, port=order.port, token=bytes.fromhex(order.token), num_threads=order.num_threads
    )
    try:
        join(settings, lambda text: _say(RankNews(text)), watch.computing)
    except MoeflowError as error:
        _say(RankEnd(str(error), may_retry=False))
        raise SystemExit(1) from None
    except Exception as error:
        logging.getLogger(__name__).exception("the rank ends")
        _say(RankEnd(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _say(message: RankMessage) -> None:
    with suppress(BrokenPipeError):  # the reader is gone: see `OrphanWatch`
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
