"""Tables of the sliced experts paper's figures: ours, and what the paper's text states of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS
from studies.parallel.paper_figures import Setting
from studies.parallel.paper_points import WHOLE_ENCODER
from studies.parallel.published_layouts import DEEPSPEED, EXACT, PER_EXPERT

GROUPED: Final = "sliced"
FASTER: Final = (CAPACITY, CAPACITY_DROPLESS, PER_EXPERT, GROUPED, EXACT)
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
        return [it for it in settings if figure in it.point.figures]

    tables = [_latencies(of("6.1"))] if of("6.1") else []
    tables += [_sweep(figure, sorted(of(figure), key=SWEEPS[figure][1])) for figure in SWEEPS if of(figure)]
    if of("6.6"):
        tables.append(_sections(of("6.6")[-1]))
    if of(WHOLE_ENCODER):
        tables.append(_encoders(of(WHOLE_ENCODER)))
    stated = [row for figure in (*SWEEPS, "6.1", "6.6") if of(figure) for row in _statements(figure, of(figure))]
    if stated:
        columns = ("figure", "the paper", "here", "holds")
        tables.append(Table("Sliced experts: what the paper states", columns, tuple(sorted(stated)), words=(1, 2, 3)))
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
        (f"{value(it):g}", *(f"{_speed_up(it, arm):.2f}, {_speed_up(it, arm, has_decoder=True):.2f}" for arm in FASTER))
        for it in settings
    )
    title = f"Figure {figure}: speed-up of layers over deepspeed, encoder and encoder-decoder"
    return Table(f"{title}: {subject(settings[0].record)}", (name, *FASTER), rows)


def _speed_up(setting: Setting, arm: str, *, has_decoder: bool = False) -> float:
    return setting.speed_up(arm, DEEPSPEED, has_decoder=has_decoder)


def _sections(setting: Setting) -> Table:
    found = [setting.sections(PER_EXPERT, is_encoder=is_encoder, layer=layer) for _, is_encoder, layer in LAYERS]
    rows = tuple(
        (name, *(f"{of_layer[name][0] * 1e3:.2f} ± {of_layer[name][1] * 1e3:.2f}" for of_layer in found))
        for name in found[0]
    )
    title = f"Figure 6.6: ms of {PER_EXPERT}'s sections, mean and deviation over ranks"
    return Table(f"{title}: {subject(setting.record)}", ("section", *(name for name, *_ in LAYERS)), rows)


def _encoders(settings: Sequence[Setting]) -> Table:
    arms = (DEEPSPEED, *FASTER)
    rows = []
    for it in settings:
        seconds = {arm: it.encode_s(arm) for arm in arms}
        name = f"{it.point.num_experts} experts, skew {it.point.router_skew:g}"
        rows.append((f"{name}: ms", *(f"{seconds[arm] * 1e3:.0f}" for arm in arms)))
        for baseline in (DEEPSPEED, CAPACITY, CAPACITY_DROPLESS):
            ratios = (f"{seconds[baseline] / seconds[arm]:.2f}" for arm in arms)
            rows.append((f"{name}: speed-up over {baseline}", *ratios))
    return Table(f"Whole encoder, wall time: {subject(settings[0].record)}", ("", *arms), tuple(rows))


def _statements(figure: str, settings: Sequence[Setting]) -> list[tuple[str, str, str, str]]:
    """Return what the paper's text states of a figure: figure, statement, ours, and whether it holds."""

    def row(stated: str, ours: str, holds: bool) -> tuple[str, str, str, str]:
        return figure, stated, ours, "yes" if holds else "no"

    last = max(settings, key=lambda it: it.point.num_experts)
    ratios = {arm: (_speed_up(last, arm), _speed_up(last, arm, has_decoder=True)) for arm in (PER_EXPERT, GROUPED)}
    grouped, per_expert = ratios[GROUPED], ratios[PER_EXPERT]
    if figure == "6.1":
        steps = {
            arm: statistics.mean(map(statistics.median, last.layer_times(arm, is_encoder=False)))
            for arm in (DEEPSPEED, PER_EXPERT, GROUPED)
        }
        decoder = steps[DEEPSPEED] / min(steps[PER_EXPERT], steps[GROUPED])
        return [
            row(
                "encoder layers: grouped is fastest, both beat the baseline",
                f"grouped {grouped[0]:.2f}, per expert {per_expert[0]:.2f}",
                grouped[0] > per_expert[0] > 1,
            ),
            row("decoder layers: both lose to the baseline", f"the better one {decoder:.2f}", decoder < 1),
        ]
    if figure == "6.2":
        best = max(_speed_up(it, arm) for it in settings for arm in (PER_EXPERT, GROUPED))
        few = [it for it in settings if it.point.num_experts <= 32]
        many = [it for it in settings if it.point.num_experts > 32]
        few_text, many_text = (
            ", ".join(f"{_speed_up(it, GROUPED) / _speed_up(it, PER_EXPERT):.2f}" for it in each)
            for each in (few, many)
        )
        found = [
            row("up to 6.84 times as fast as the baseline", f"up to {best:.2f}", best >= 6.84 / 1.2),
            row(
                "per expert is ahead up to 32 experts: grouped / per expert",
                few_text,
                all(_speed_up(it, GROUPED) < _speed_up(it, PER_EXPERT) for it in few),
            ),
            row(
                "grouped is ahead beyond 32 experts: grouped / per expert",
                many_text,
                all(_speed_up(it, GROUPED) > _speed_up(it, PER_EXPERT) for it in many),
            ),
        ]
        if last.point.num_experts == 256:
            found.append(
                row(
                    "256 experts: grouped 2.94 (encoder), 1.26 (encoder-decoder)",
                    f"{grouped[0]:.2f}, {grouped[1]:.2f}",
                    grouped[0] >= 2.94 / 1.2 and grouped[1] >= 1.26 / 1.2,
                )
            )
        return found
    if figure == "6.3":
        by_batch = [_speed_up(it, GROUPED) for it in sorted(settings, key=lambda it: it.point.num_sequences)]
        text = ", ".join(f"{it:.2f}" for it in by_batch)
        return [
            row("the speed-up grows with the batch", text, by_batch == sorted(by_batch) and len(by_batch) > 1),
            row("small batches: the baseline is ahead", text, by_batch[0] < 1),
        ]
    if figure in ("6.4", "6.5"):
        found = [_speed_up(it, GROUPED) for it in settings]
        spread = max(found) / min(found)
        what = "skew" if figure == "6.4" else "number of hot experts"
        return [row(f"the speed-up hardly depends on the {what}", f"largest / smallest {spread:.2f}", spread < 1.25)]
    shares = []
    for is_encoder in (True, False):
        sections = last.sections(PER_EXPERT, is_encoder=is_encoder, layer=0)
        shares.append(sum(it[1] for it in sections.values()) / sum(it[0] for it in sections.values()))
    text = f"{shares[0]:.0%} of an encoder's layer, {shares[1]:.0%} of a decoder's"
    return [row("ranks deviate more in decoder layers", text, shares[1] > shares[0])]
