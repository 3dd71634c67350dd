"""A rank of an engine other than the first, on the same machine: see `parallel/child_main.py`.

Arguments: descriptors of the memory which ranks share, and its rank. Standard input brings a `RankStart` and then a
`PassInput` a pass; standard output gets one byte once the model is loaded. It ends with its input, so also when the
first rank is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import msgspec

from moeflow.core.errors import GroupError, MoeflowError
from moeflow.engine.ranks.computing import compute_passes
from moeflow.engine.ranks.rank_processes import RankStart, join_group, read_messages

logger = logging.getLogger(__name__)


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first rank decides
    *descriptors, rank = (int(argument) for argument in sys.argv[1:])
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    messages = read_messages(sys.stdin.buffer)
    first = next(messages, None)
    if first is None:
        return
    start = msgspec.msgpack.decode(first, type=RankStart)
    assert start.config.parallel is not None
    group = join_group(descriptors, rank, start.process_ids, start.config.parallel)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        compute_passes(start.config, group, messages, _note_loaded)
    except GroupError as error:  # whatever failed, the first rank notices and reports it
        logger.debug("%s", error)
        raise SystemExit(1) from None
    except MoeflowError as error:
        logger.error("%s", error)
        group.abort(str(error))
        raise SystemExit(1) from None
    except Exception as error:
        logger.exception("the rank ends")
        group.abort(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _note_loaded() -> None:
    os.write(sys.stdout.fileno(), b"\n")
