"""Tables of the sliced experts paper's figures: ours, and what the paper's text states of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS
from studies.parallel.paper_figures import Clock, Setting
from studies.parallel.paper_points import WHOLE_ENCODER
from studies.parallel.paper_statements import STATEMENTS
from studies.parallel.published_layouts import DEEPSPEED, EXACT, GROUPED, PER_EXPERT

FASTER: Final = (CAPACITY, CAPACITY_DROPLESS, PER_EXPERT, GROUPED, EXACT)
CLOCKS: Final[dict[str, Clock]] = {"": "wall_s", ", processor time": "processor_s"}
SWEEPS: Final[dict[str, tuple[str, Callable[[Setting], float]]]] = {
    "6.2": ("experts", lambda it: it.point.num_experts),
    "6.3": ("sequences a rank", lambda it: it.point.num_sequences),
    "6.4": ("skew", lambda it: it.point.router_skew),
    "6.5": ("hot experts", lambda it: it.point.hot),
}
LAYERS: Final = (
    ("encoder, first", True, 0),
    ("encoder, last", True, -1),
    ("decoder, first", False, 0),
    ("decoder, last", False, -1),
)


def paper_tables(records: Sequence[Record]) -> list[Table]:
    """Return the tables of records of one command."""
    settings = [Setting(record) for record in records]

    def of(figure: str) -> list[Setting]:
        found = [it for it in settings if figure in it.point.figures]
        if figure in (WHOLE_ENCODER, "6.2"):
            return found
        number = statistics.mode(it.point.num_experts for it in found) if found else 0
        return [it for it in found if it.point.num_experts == number]

    tables = [_latencies(of("6.1"))] if of("6.1") else []
    tables += [_sweep(figure, sorted(of(figure), key=SWEEPS[figure][1])) for figure in SWEEPS if of(figure)]
    if of("6.6"):
        tables.append(_sections(of("6.6")[-1]))
    if encoders := of(WHOLE_ENCODER) or of("6.2"):
        tables.append(_encoders(sorted(encoders, key=SWEEPS["6.2"][1])))
    stated = [(figure, it) for figure, find in STATEMENTS.items() if of(figure) for it in find(of(figure))]
    if stated:
        rows = tuple((figure, it.stated, it.ours, "yes" if it.holds else "no") for figure, it in stated)
        columns = ("figure", "the paper", "here", "holds")
        tables.append(Table("Sliced experts: what the paper states", columns, rows, words=(1, 2, 3)))
    return tables


def subject(record: Record) -> str:
    """Return what records of one table have in common."""
    ranks, cores = record["num_ranks"], record["num_cores"]
    mark = "" if ranks <= cores else f", oversubscribed: {cores} cores"
    return f"{record['size']}, {record['num_layers']} layers, {ranks} ranks of one thread{mark}"


def _latencies(settings: Sequence[Setting]) -> Table:
    (setting, *_) = settings
    arms = (DEEPSPEED, *FASTER)
    rows = []
    for name, is_encoder, layer in LAYERS:
        times = [setting.layer_times(arm, is_encoder=is_encoder)[layer] for arm in arms]
        rows.append((name, *(f"{statistics.median(it) * 1e3:.1f} (to {max(it) * 1e3:.1f})" for it in times)))
    title = f"Figure 6.1: ms of a layer, own router, {setting.point.num_experts} experts"
    return Table(f"{title}: {subject(setting.record)}", ("layer", *arms), tuple(rows))


def _sweep(figure: str, settings: Sequence[Setting]) -> Table:
    name, value = SWEEPS[figure]
    rows = tuple(
        (f"{value(it):g}{by}", *(_both_models(it, arm, clock) for arm in FASTER))
        for it in settings
        for by, clock in CLOCKS.items()
    )
    experts = "" if figure == "6.2" else f"{settings[0].point.num_experts} experts, "
    title = f"Figure {figure}: {experts}speed-up of layers over deepspeed, encoder and encoder-decoder"
    return Table(f"{title}: {subject(settings[0].record)}", (name, *FASTER), rows)


def _both_models(setting: Setting, arm: str, clock: Clock) -> str:
    ratios = (setting.speed_up(arm, has_decoder=has_decoder, clock=clock) for has_decoder in (False, True))
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _sections(setting: Setting) -> Table:
    found = [setting.sections(PER_EXPERT, is_encoder=is_encoder, layer=layer) for _, is_encoder, layer in LAYERS]
    rows = tuple(
        (name, *(f"{of_layer[name][0] * 1e3:.2f} ± {of_layer[name][1] * 1e3:.2f}" for of_layer in found))
        for name in found[0]
    )
    experts = f"{setting.point.num_experts} experts"
    title = f"Figure 6.6: {experts}, ms of {PER_EXPERT}'s sections, mean and deviation over ranks"
    return Table(f"{title}: {subject(setting.record)}", ("section", *(name for name, *_ in LAYERS)), rows)


def _encoders(settings: Sequence[Setting]) -> Table:
    arms = (DEEPSPEED, *FASTER)
    rows = []
    for it in settings:
        for by, clock in CLOCKS.items():
            seconds = {arm: it.encoder_s(arm, clock) for arm in arms}
            name = f"{it.point.num_experts} experts, skew {it.point.router_skew:g}{by}"
            rows.append((f"{name}: ms", *(f"{seconds[arm] * 1e3:.0f}" for arm in arms)))
            for baseline in (DEEPSPEED, CAPACITY, CAPACITY_DROPLESS):
                ratios = (f"{seconds[baseline] / seconds[arm]:.2f}" for arm in arms)
                rows.append((f"{name}: speed-up over {baseline}", *ratios))
    return Table(f"Whole encoder: {subject(settings[0].record)}", ("", *arms), tuple(rows))
