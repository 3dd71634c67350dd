"""What ranks recorded of their passes, which they tell the first one between two passes when somebody asks."""

from __future__ import annotations

import msgspec
import torch

from moeflow.parallel.group import Group
from moeflow.pipeline.runtime.recording import Recording


class SpansAsked(msgspec.Struct, frozen=True, tag="spans"):
    """Asks ranks to record passes from now on, and for the last ones so far; none: to record no more."""

    num_passes: int


def gather_recordings(group: Group, own: Recording | None) -> list[Recording]:
    """Return what the other ranks give here; the first gives nothing. Raises: GroupError.

    Blocks: until all ranks have come.
    """
    content = b"" if own is None else msgspec.msgpack.encode(own)
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    told = group.all_gather("spans of passes", sent)
    decoder = msgspec.msgpack.Decoder(Recording)
    return [decoder.decode(each.numpy().tobytes()) for rank, each in enumerate(told) if rank and own is None]
