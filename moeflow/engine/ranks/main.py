"""A rank of an engine other than the first: `python -m moeflow.engine.ranks.main DESCRIPTOR RANK`.

DESCRIPTOR is that of the memory which the ranks share. Standard input brings a `RankStart` and then a `PassInput` a
pass; standard output gets one byte once the model is loaded. It ends with its input, so also when the first rank is
gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import closing

import msgspec
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError, MoeflowError
from moeflow.engine.compute_setup import set_up
from moeflow.engine.model_runner import make_kv_storage
from moeflow.engine.ranks.rank_processes import RankStart, read_message
from moeflow.engine.runner_loading import make_allocator, make_upkeep, weight_memory
from moeflow.models.loading import load_model
from moeflow.models.pass_input import PassInput, rows_of
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup

logger = logging.getLogger(__name__)


def run(config: EngineConfig, group: Group) -> None:
    """Load the model and compute passes until there are no more. Raises: as loading; GroupError."""
    set_up(config)
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        upkeep = make_upkeep(checkpoint, config, group)
        allocator = make_allocator(config, weight_memory(checkpoint, config), ranks=upkeep)
        model = load_model(checkpoint, allocator, num_threads=config.num_threads)
    kv = make_kv_storage(config, model.config, group.rank)
    os.write(sys.stdout.fileno(), b"\n")
    decoder = msgspec.msgpack.Decoder(PassInput)
    device = torch.device(config.device)
    while (message := read_message(sys.stdin.buffer)) is not None:
        given = decoder.decode(message)
        hidden = model(*given.tensors(kv, device))
        if model.shares_head:
            for rows in given.logit_rows:
                model.logits(rows_of(hidden, rows))
        upkeep.end_pass()


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first rank decides
    descriptor, rank = (int(argument) for argument in sys.argv[1:])
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    raw = read_message(sys.stdin.buffer)
    if raw is None:
        return
    start = msgspec.msgpack.decode(raw, type=RankStart)
    group = SharedMemoryGroup(descriptor, rank, start.process_ids, start.timeout_s)
    os.close(descriptor)
    try:
        run(start.config, group)
    except GroupError as error:  # whatever failed, the first rank notices and reports it
        logger.warning("%s", error)
        raise SystemExit(1) from None
    except MoeflowError as error:
        logger.error("%s", error)
        group.abort(str(error))
        raise SystemExit(1) from None
    except Exception as error:
        logger.exception("the rank ends")
        group.abort(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
