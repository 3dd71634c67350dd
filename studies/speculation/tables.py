"""The study's record as tables: how much faster, how often drafts are right, what trees are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

TOTAL = "all sets"


def speculation_tables(record: Record) -> list[Table]:
    """Return one or two tables of what drafts as far as it pays, and one of trees against chains, if there is any."""
    about = f"{record['model']}, {record['weight_format']}"
    free = [arm for arm in record["arms"] if arm["size"] is None]
    tables = [_speed_table(about, free)]
    if any(one["drafted"] for arm in free for one in arm["acceptance"]):
        tables.append(_depth_table(about, free))
    trees = [arm for arm in record["arms"] if arm["size"] is not None and not arm["is_chain"]]
    chains = {_shape(arm): arm for arm in record["arms"] if arm["is_chain"]}
    if trees:
        tables.append(_tree_table(about, [(tree, chains[_shape(tree)]) for tree in trees]))
    return tables


def _shape(arm: dict[str, Any]) -> tuple[int, int]:
    return len(arm["speculators"]), arm["size"]


def by_depth(arm: dict[str, Any]) -> list[tuple[str, list[int], list[int]]]:
    """Return each speculator of an arm with its drafted and accepted tokens by depth, as deep as any was drafted."""
    return [
        (one["speculator"], one["drafted"][: _deepest(one)], one["accepted"][: _deepest(one)])
        for one in arm["acceptance"]
    ]


def _deepest(one: dict[str, Any]) -> int:
    return max((depth for depth, number in enumerate(one["drafted"], start=1) if number), default=0)


def _speed_table(about: str, arms: Sequence[dict[str, Any]]) -> Table:
    names = [one["set"] for one in arms[0]["sets"]]
    rows = []
    for place, name in enumerate(names):
        for arm in arms:
            one = arm["sets"][place]
            rows.append(
                (
                    name,
                    arm["name"],
                    f"{one['plain_tokens_per_s']:.1f}",
                    f"{one['tokens_per_s']:.1f}",
                    f"{one['speedup']:.2f}x ({one['speedup_low']:.2f}-{one['speedup_high']:.2f})",
                    f"{one['tokens_per_pass']:.2f}",
                    f"{one['accepted'] / max(one['passes'], 1):.2f} of {one['drafted'] / max(one['passes'], 1):.2f}",
                )
            )
    columns = ("prompts", "drafts by", "tokens/s without", "with", "speed-up (middle half)", "tokens a pass")
    return Table(f"Speed: {about}", (*columns, "right a pass, of drafts"), tuple(rows))


def _depth_table(about: str, arms: Sequence[dict[str, Any]]) -> Table:
    rows = []
    found = [(arm["name"], *one) for arm in arms for one in by_depth(arm)]
    deepest = max(len(drafted) for _, _, drafted, _ in found)
    for arm_name, speculator, drafted, accepted in found:
        name = speculator if arm_name == speculator else f"{speculator}, of {arm_name}"
        cells = [f"{right / made:.0%}" if made else "" for made, right in zip(drafted, accepted, strict=True)]
        cells += [""] * (deepest - len(cells))
        rows.append((name, f"{sum(accepted)} of {sum(drafted)}", *cells))
    columns = ("drafts by", "right", *(f"{depth} ahead" for depth in range(1, deepest + 1)))
    notes = ("Shares are of the drafts that were computed so far ahead: those are the promising ones.",)
    return Table(f"Drafts that were right, by tokens ahead: {about}", columns, tuple(rows), notes)


def _tree_table(about: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    rows = []
    for tree, chain in pairs:
        sets = list(zip(tree["sets"], chain["sets"], strict=True))
        for name, one, other in [*((it["set"], it, of) for it, of in sets), (TOTAL, _total(tree), _total(chain))]:
            right, chain_right = (it["accepted"] / max(it["drafting_passes"], 1) for it in (one, other))
            drafted, chain_drafted = (it["drafted"] / max(it["drafting_passes"], 1) for it in (one, other))
            rows.append(
                (
                    name,
                    str(len(tree["speculators"])),
                    str(tree["size"]),
                    f"{drafted:.2f} / {chain_drafted:.2f}",
                    f"{right:.2f} / {chain_right:.2f}",
                    f"{right / chain_right:.2f}" if chain_right else "",
                    f"{one['tokens_per_s']:.1f} / {other['tokens_per_s']:.1f}",
                )
            )
    columns = (
        "prompts",
        "speculators",
        "drafts at most",
        "drafts a pass, tree / chain",
        "right a pass",
        "ratio",
        "tokens/s",
    )
    notes = ("Passes are those with drafts. A chain is the branch of which most is expected to be right.",)
    return Table(f"Trees against the best single chain: {about}", columns, tuple(rows), notes)


def _total(arm: dict[str, Any]) -> dict[str, Any]:
    sums = {name: sum(one[name] for one in arm["sets"]) for name in ("drafting_passes", "drafted", "accepted")}
    tokens = [one["tokens_per_pass"] * one["passes"] for one in arm["sets"]]
    seconds = sum(number / one["tokens_per_s"] for number, one in zip(tokens, arm["sets"], strict=True))
    return {**sums, "tokens_per_s": sum(tokens) / seconds}
