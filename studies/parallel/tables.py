"""Records of the study as tables: a single case in full, several by what is compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.core.units import format_bytes, format_seconds
from studies.parallel.figures import BASELINE, LayoutFigures, figures_of, speed_ups

ABOUT = (
    f"Path: processor time of the slowest rank, summed over sections; speed-up: over {BASELINE}; work: the most of a "
    "rank over the mean; idle: of the path, mean and standard deviation over ranks; sent: by a rank, to others."
)


def parallel_tables(records: Sequence[Record]) -> list[Table]:
    """Return the tables of records of one grid."""
    if len(records) == 1:
        (record,) = records
        tables = [_layout_table(record), _section_table(record)]
        return [*tables, _validation_table(record)] if _is_validated(record) else tables
    tables = [
        _grid_table("Speed-up over capacity-dropless", records, lambda figures, name: _speed_up(figures, name)),
        _grid_table("Most work of a rank over the mean", records, lambda figures, name: _imbalance(figures[name])),
        _grid_table("Idle, of the critical path", records, lambda figures, name: _idle(figures[name])),
    ]
    if all(map(_is_validated, records)):
        tables.append(
            _grid_table("Predicted / measured work", records, lambda figures, name: _work_ratio(figures[name]))
        )
    return [*tables[:-1], _with_notes(tables[-1], records)]


def case_name(record: Record) -> str:
    """Return what tells a case from others of its grid."""
    tokens = max(record["num_tokens"])
    return f"{record['layer']['num_experts']} experts, skew {record['router_skew']:g}, {tokens:,} tokens"


def title(record: Record) -> str:
    """Return what cases of a grid have in common."""
    layer = record["layer"]
    matrices = "three" if layer["is_gated"] else "two"
    return (
        f"{layer['num_ranks']} ranks, top {layer['top_k']}, experts of {matrices} matrices {layer['hidden']} x "
        f"{layer['width']}, {layer['weights']}"
    )


def _layout_table(record: Record) -> Table:
    figures = figures_of(record)
    has_cores = record["num_cores"] >= record["layer"]["num_ranks"]
    rows = []
    for name, it in figures.items():
        row = [
            name,
            format_seconds(float(np.median(it.critical_s))),
            spread_text(speed_ups(figures, name)),
            _imbalance(it),
            _idle(it),
            format_bytes(statistics.fmean(it.fields["sent_bytes"])),
            f"{it.fields['dropped_share']:.1%}",
        ]
        rows.append((*row, *([format_seconds(statistics.median(it.fields["wall_s"]))] if has_cores else [])))
    columns = ("layout", "path", "speed-up", "work", "idle", "sent", "dropped")
    wall = ("wall time",) if has_cores else ()
    heading = f"{case_name(record)} a rank: {title(record)}"
    return Table(heading, (*columns, *wall), tuple(rows), (ABOUT, *_notes([record])))


def _section_table(record: Record) -> Table:
    rows = []
    for name, it in figures_of(record).items():
        means, stds = 1000 * it.usual_s.mean(axis=0), 1000 * it.usual_s.std(axis=0)
        rows.append((name, *(f"{mean:.2f} ± {std:.2f}" for mean, std in zip(means, stds, strict=True))))
    columns = ("layout", *record["sections"])
    return Table("Processor time in ms, mean and standard deviation over ranks", columns, tuple(rows))


def _validation_table(record: Record) -> Table:
    rows = []
    for name, it in figures_of(record).items():
        sections = (f"{ratio:.2f}" for ratio in np.median(it.predicted_ratios, axis=0))
        rows.append((name, *sections, _work_ratio(it)))
    columns = ("layout", *record["sections"], "work")
    return Table("Predicted / measured, median over ranks", columns, tuple(rows), (_accuracy([record]),))


def _grid_table(heading: str, records: Sequence[Record], cell: Callable[[dict[str, LayoutFigures], str], str]) -> Table:
    layouts = list(dict.fromkeys(name for record in records for name in record["layouts"]))
    rows = []
    for record in records:
        figures = figures_of(record)
        rows.append((case_name(record), *(cell(figures, name) if name in figures else "" for name in layouts)))
    return Table(f"{heading}: {title(records[0])}", ("", *layouts), tuple(rows))


def _with_notes(table: Table, records: Sequence[Record]) -> Table:
    notes = [ABOUT, *_notes(records)]
    steady = _steadiness(records)
    notes += [steady] if steady else []
    notes += [_accuracy(records)] if all(map(_is_validated, records)) else []
    return Table(table.title, table.columns, table.rows, tuple(notes))


def _notes(records: Sequence[Record]) -> list[str]:
    """Return how results compare with those of one process, and what wall time would mean."""
    exact = [name for name in records[0]["layouts"] if all(it["layouts"][name]["is_equal"] for it in records)]
    notes = [f"Sums equal one process's to the bit: {', '.join(exact)}."] if exact else []
    others = {
        name: max(it["layouts"][name]["error"] for it in records) for name in records[0]["layouts"] if name not in exact
    }
    notes += [
        f"{name} adds partial sums in another order: its sums differ by {error:.0e} of the largest at most."
        for name, error in others.items()
    ]
    return notes


def _steadiness(records: Sequence[Record]) -> str:
    """Return how far the critical path of slices moves with the skew alone; empty if there is one skew only."""
    paths: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        figures = figures_of(record)
        if "sliced" in figures:
            key = (record["layer"]["num_experts"], *record["num_tokens"])
            paths.setdefault(key, []).append(float(np.median(figures["sliced"].critical_s)))
    moves = [max(abs(path / statistics.fmean(of_size) - 1) for path in of_size) for of_size in paths.values()]
    if all(len(of_size) == 1 for of_size in paths.values()):
        return ""
    return f"Critical paths of sliced lie within {max(moves):.1%} of their mean over the skews."


def _accuracy(records: Sequence[Record]) -> str:
    """Return how far predictions are off: of what each rank does in all, and in each section."""
    all_figures = [it for record in records for it in figures_of(record).values()]
    work = np.concatenate([abs(it.predicted_work_ratios - 1) for it in all_figures])
    sections = np.concatenate([abs(it.predicted_ratios - 1) for it in all_figures])  # [cases * layouts * P, S]
    of_each = zip(records[0]["sections"], np.median(sections, axis=0), strict=True)
    measured = "; ".join(dict.fromkeys(filter(None, (record["predicted_on"] for record in records))))
    return (
        f"Predicted and measured work of a rank differ by {np.median(work):.0%} in the median, {work.max():.0%} at "
        f"most; by section: {', '.join(f'{name} {error:.0%}' for name, error in of_each)}."
        + (f" The machine was {measured}." if measured else "")
    )


def _is_validated(record: Record) -> bool:
    return all(it.is_predicted for it in figures_of(record).values())


def _speed_up(figures: dict[str, LayoutFigures], name: str) -> str:
    return spread_text(speed_ups(figures, name), 2)


def _imbalance(figures: LayoutFigures) -> str:
    return f"{figures.work_imbalance:.2f}"


def _idle(figures: LayoutFigures) -> str:
    return f"{figures.idle_shares.mean():.0%} ± {figures.idle_shares.std():.0%}"


def _work_ratio(figures: LayoutFigures) -> str:
    return spread_text(figures.predicted_work_ratios.tolist(), 2)
