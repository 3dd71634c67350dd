"""How fast the kernels of the compared systems are: from measurements of kernels alone, and from the systems' sources.

No figure here comes from a run of a whole model, so all of tables 4 and 5 are predictions.

- **Experts** of MoE-Lightning and of its authors' FlexGen are vLLM's Triton kernel (`fused_moe.py` in both). It
  computes whole tiles of an expert's rows: of 16 where a micro-batch has no more choices than there are experts, or 64.
  + *L4*: 12.2, 12.3, 12.5 and 13.0 ms for 32 to 256 tokens (figure 9; `plots/ablation/ablation_2.py` of the authors'
    artifact). Many rows are as fast as a large product in torch, which the machine file has.
  + *L4, prompts*: a tile of 64 x 64 results takes 32 operations for each byte from the level 2 cache. An L40 of the
    same architecture reads 5,200 GB/s there at 2.49 GHz (RRZE-HPC/gpu-benches, commit 1038c5d). The L4 has half of its
    memory channels and cache, hence 1,044 bytes a cycle. Its 58 multiprocessors compute 1,024 operations a cycle each.
    So the kernel reaches 0.56 of a large product, where tensor cores are the limit, at the same clock.
  + *T4*: computed, since no measurement is published. Triton reaches 0.52 of cuBLAS on Turing (triton-lang/triton,
    issue 189: RTX 2080, 4096 rows and more). Turing has no asynchronous copies to shared memory, which Triton's
    pipelines need. So reading and computing add up.

- **Attention of MoE-Lightning on the host** reads 45 GB/s (figure 9: 134 MB in 2.98 ms) on a machine that reads
  81.6 GB/s (76 GiB/s: the artifact's `--cpu-mem-bdw 76`).

- **Attention of FlexGen** is torch over copies (`moe_pytorch_backend.py`); 4 query heads share a stored value.
  + On the device 2 bytes are read and 8 written by the repetition, 8 read and 8 written by the transposition, and 8
    read by the product: 34.
  + On the host, where memory is read before it is written, widening to float32 moves 2 + 4 + 4 bytes, the repetition
    4 + 16 + 16, the transposition 16 + 16 + 16, and the product 16: 110.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.hardware import DEVICE, RAM, KernelEfficiency, Machine, MemoryLevel
from moeflow.planner.costs.roofline import processor_of

STORED_BYTES: Final = 2  # of a value of keys and values
QUERY_HEADS: Final = 4  # that share it
EXPERT_VALUES: Final = 3 * 4096 * 14336  # of Mixtral 8x7B
NUM_EXPERTS: Final = 8
FIGURE_9: Final = {8: 12.2e-3, 16: 12.3e-3, 32: 12.5e-3, 64: 13.0e-3}  # rows of each expert: seconds of a layer
TRITON_ON_TURING: Final = 0.52  # of cuBLAS' speed
CACHE_BYTES: Final = 5200e9 / 2.49e9 / 2  # of an L4's level 2 cache, a cycle
CACHE_SHARE_ON_L4: Final = CACHE_BYTES * 32 / (58 * 1024)  # of a large product's speed
TILES: Final = {1.0: 16, 1.5: 16, 1.6: 64, 64.0: 64, 1024.0: 64}  # mean rows of an expert: rows of a tile


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels a system has."""

    has_fused_experts: bool = False  # otherwise the machine's usual ones
    waits_for_cache: bool = True  # whether the level 2 cache bounds them
    device_bytes: float = STORED_BYTES  # that attention moves for each stored value
    host_bytes: float = STORED_BYTES
    host_share: float | None = None  # of bandwidth that attention reaches; None: the machine's usual one


LIGHTNING_KERNELS: Final = Kernels(has_fused_experts=True, host_share=45.0 / 81.6)
FLEXGEN_KERNELS: Final = Kernels(has_fused_experts=True, device_bytes=34, host_bytes=110)
DEEPSPEED_KERNELS: Final = Kernels()


def with_kernels(machine: Machine, kernels: Kernels) -> Machine:
    """Return a machine on which a system's kernels run."""
    device, host = machine.level(DEVICE), machine.level(RAM)
    gpu, cpu = processor_of(device), processor_of(host)
    entries = [it for it in gpu.efficiencies if it.kernel != "attention" or it.rows > QUERY_HEADS]
    bandwidth_share = min(gpu.measured("attention", "float16"))[1]
    entries.append(_decode_attention(bandwidth_share * STORED_BYTES / kernels.device_bytes))
    if kernels.has_fused_experts:
        entries = [it for it in entries if it.kernel != "experts"] + list(_fused_experts(device, kernels))
    share = kernels.host_share or cpu.default_efficiency
    attention = _decode_attention(share * STORED_BYTES / kernels.host_bytes)
    levels = {
        DEVICE: replace(device, processor=replace(gpu, efficiencies=tuple(entries))),
        RAM: replace(host, processor=replace(cpu, efficiencies=(*cpu.efficiencies, attention))),
    }
    return replace(machine, levels=tuple(levels.get(level.name, level) for level in machine.levels))


def _decode_attention(share: float) -> KernelEfficiency:
    return KernelEfficiency(kernel="attention", dtype="float16", rows=QUERY_HEADS, share=share)


def _fused_experts(device: MemoryLevel, kernels: Kernels) -> Iterator[KernelEfficiency]:
    """Yield the shares of the roof that the Triton kernel reaches."""
    gpu = processor_of(device)
    usual = dict(gpu.measured("experts", "float16"))
    few, many = usual[min(usual)], usual[max(usual)]
    for rows, tile in TILES.items():
        read_s = STORED_BYTES * EXPERT_VALUES / device.read_bytes_per_s
        compute_s = 2 * rows * EXPERT_VALUES / gpu.peak("float16")
        if "T4" in gpu.name:
            seconds = read_s / few + max(tile / rows, 1.0) * compute_s / (many * TRITON_ON_TURING)
        elif rows in FIGURE_9:
            seconds = FIGURE_9[int(rows)] / NUM_EXPERTS
        else:
            cache_share = CACHE_SHARE_ON_L4 if kernels.waits_for_cache else 1.0
            seconds = max(read_s / few, compute_s / (many * cache_share))
        yield KernelEfficiency(kernel="experts", dtype="float16", rows=rows, share=max(read_s, compute_s) / seconds)
