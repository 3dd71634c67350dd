"""Claim: experts shared between a GPU and the CPU are forecast within a factor of two of what other programs publish.

Machines are described by data sheets, and nothing is fitted. The programs keep whole layers' experts on the CPU, so the
share of experts on the GPU is theirs. The forecast is of moeflow's own way, so the ratio is no comparison of speed.

    python -m studies.hybrid_rivals
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import click

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.plan import Workload
from moeflow.kernels.weight_format import LayerFormats
from moeflow.models.registry import read_bare_config
from moeflow.planner.costs.hybrid_costs import HybridCosts, hybrid_policy_of
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.model_files import shipped_models
from studies.harness.command import run_study

EFFICIENCY: Final = 0.8  # of data sheets' figures, as in the shipped machines
CHAT: Final = Workload(prompt_len=512, gen_len=256, max_prompt_len=512)
LONG: Final = Workload(prompt_len=2048, gen_len=1, max_prompt_len=2048)
_HALF: Final = LayerFormats(
    q_proj="bfloat16", k_proj="bfloat16", v_proj="bfloat16", o_proj="bfloat16", up="mxfp4", down="mxfp4"
)


class Rival(NamedTuple):
    """A published figure, and what our forecast takes for the same."""

    name: str
    costs: ModelCosts
    machine: Machine
    share: float  # of experts on the GPU
    published: tuple[float, float]  # tokens/s, from and to
    source: str
    workload: Workload = CHAT

    @property
    def published_text(self) -> str:
        """The published tokens a second."""
        return "-".join(f"{each:g}" for each in dict.fromkeys(self.published))

    @property
    def forecast(self) -> float:
        """The tokens a second of one request, decoding, or of its prompt if it asks for no answer."""
        number = round(self.share * self.costs.shape.routing.num_experts)
        model = HybridCosts(self.machine, self.costs, self.workload, host_format=self.costs.formats.matrices)
        found = model.predict(hybrid_policy_of(self.costs, 1, number))
        is_prompt = self.workload.gen_len == 1
        return self.workload.prompt_len / found.first_token_s if is_prompt else 1 / found.decode_s

    @property
    def ratio(self) -> float:
        """The forecast over the published figure."""
        return self.forecast / (sum(self.published) / 2)


def machine(
    name: str, *, cpu_flops: float, ram: float, gpu_flops: float, gpu_gib: int, gpu: float, link: float
) -> Machine:
    """Return a machine with a GPU of so many GiB; rates are those of data sheets, in FLOP/s and bytes a second."""
    host = Processor(
        name="cpu", peak_flops_per_s=(("float32", cpu_flops),), default_efficiency=EFFICIENCY, launch_s=5e-6
    )
    card = Processor(
        name="gpu", peak_flops_per_s=(("bfloat16", gpu_flops),), default_efficiency=EFFICIENCY, launch_s=1e-5
    )
    rates = (
        LinkRate(transfer_bytes=16384, bytes_per_s=0.1 * link),
        LinkRate(transfer_bytes=262144, bytes_per_s=0.55 * link),
        LinkRate(transfer_bytes=4194304, bytes_per_s=link),
    )
    return Machine(
        name=name,
        levels=(
            MemoryLevel(name=RAM, capacity_bytes=128 << 30, read_bytes_per_s=ram, processor=host),
            MemoryLevel(name=DEVICE, capacity_bytes=gpu_gib << 30, read_bytes_per_s=gpu, processor=card),
        ),
        links=(Link(source=RAM, target=DEVICE, rates=rates), Link(source=DEVICE, target=RAM, rates=rates)),
        num_devices=1,
    )


# 10 cores of 64 FLOP a cycle at 3.7 GHz and 4 x DDR4-2933; 8 GB at 448 GB/s, PCIe 3.0
RTX_2080: Final = machine(
    "i9-10900X, RTX 2080", cpu_flops=2.4e12, ram=93.9e9, gpu_flops=40e12, gpu_gib=8, gpu=448e9, link=12e9
)
# 8 cores of 32 and 16 of 16 FLOP a cycle, 2 x DDR5-5600. The card is not named: one of 8 GB at 272 GB/s
I9_14900K: Final = machine(
    "i9-14900K, 8 GB", cpu_flops=2.4e12, ram=89.6e9, gpu_flops=60e12, gpu_gib=8, gpu=272e9, link=25e9
)
# kt-kernel used 16 cores, of 128 FLOP a cycle in bfloat16 at 3.55 GHz. A socket has 12 x DDR5-6000; PCIe 5.0
RTX_5090: Final = machine(
    "EPYC 9355, RTX 5090", cpu_flops=7.3e12, ram=576e9, gpu_flops=209e12, gpu_gib=32, gpu=1792e9, link=50e9
)


def rivals() -> list[Rival]:
    """Return the published figures."""
    qwen = read_bare_config(shipped_models()["qwen3-30b-a3b"])
    oss = read_bare_config(shipped_models()["gpt-oss-20b"])
    kinds = (oss.attention.layer_kinds * 2)[:36]
    oss = oss.with_fields(num_layers=36, num_experts=128, layer_kinds=kinds)
    four = ModelCosts(qwen, Formats(matrices="q4_k", embeddings="q6_k", kv="bfloat16", activation_bytes=2))
    half = ModelCosts(qwen, Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16", activation_bytes=2))
    formats = Formats(
        matrices="mxfp4",
        embeddings="bfloat16",
        kv="bfloat16",
        activation_bytes=2,
        routers="bfloat16",
        layers=(_HALF,) * 36,
    )
    by_llmfit = "https://github.com/AlexsJones/llmfit/pull/755"
    by_reader = "https://gokawiil.com/article/74814"
    by_ktransformers = "https://github.com/kvcache-ai/ktransformers/issues/1914"
    share = 28 / 128
    return [
        Rival("llama.cpp, Qwen3-30B-A3B Q4_K_M, --n-cpu-moe 36", four, RTX_2080, 12 / 48, (36.7, 36.7), by_llmfit),
        Rival("llama.cpp, gpt-oss-120b, --cpu-moe", ModelCosts(oss, formats), I9_14900K, 0.0, (25.0, 25.6), by_reader),
        Rival("kt-kernel, Qwen3-30B-A3B in bfloat16", half, RTX_5090, share, (45.8, 52.5), by_ktransformers),
        Rival("kt-kernel, the same, a prompt", half, RTX_5090, share, (2966.6, 2966.6), by_ktransformers, LONG),
    ]


def table(found: Sequence[Rival]) -> Table:
    """Return forecasts beside published figures."""
    rows = [(it.name, it.machine.name, f"{it.forecast:.3g}", it.published_text, f"{it.ratio:.2f}") for it in found]
    columns = ("program", "machine", "forecast", "published", "ratio")
    sources = tuple(f"{each.machine.name}: {each.source}" for each in {it.source: it for it in found}.values())
    return Table("Experts on GPU and CPU, tokens/s", columns, tuple(rows), sources)


@click.command(help=__doc__)
def main() -> None:
    """Print the table."""
    show(table(rivals()))


if __name__ == "__main__":
    run_study(main)
