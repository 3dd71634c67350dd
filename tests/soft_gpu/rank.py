"""A rank with a GPU in software, with the arguments of `moeflow.engine.ranks.main`.

It imports no transformers, which take three seconds.
"""

from __future__ import annotations

from tests.soft_gpu import machine

machine.prepare()

from moeflow.engine.ranks import main as rank_main  # noqa: E402
from tests.soft_gpu.offloading import soft_offloading  # noqa: E402

if __name__ == "__main__":
    with soft_offloading():
        rank_main.main()
