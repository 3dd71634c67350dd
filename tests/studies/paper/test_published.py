"""Predictions of what MoE-Lightning published, and the parts that they rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.hardware import DEVICE
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.task import checked
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import work_seconds
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.model_files import shipped_models
from studies.paper.flexgen_loop import flexgen_host_loop, flexgen_loop
from studies.paper.kernels import FLEXGEN_KERNELS, LIGHTNING_KERNELS, with_kernels
from studies.paper.one_device import (
    BAR,
    CELLS,
    FIGURE_7,
    TABLES,
    TERMS,
    UNPADDED,
    as_printed,
    pairs_in_order,
    predict,
)
from studies.paper.several_devices import (
    FORMATS,
    SCALINGS,
    STATEMENTS,
    case_study,
    host_is_ahead,
    resident_share,
    scaling,
    two_a100s,
)

MIXTRAL = ModelCosts(read_bare_config(shipped_models()["mixtral-8x7b"]), FORMATS)


def test_no_figure_of_a_whole_model_went_into_the_machine_files():
    for name in ("paper-s1", "paper-s2", *(it for one in SCALINGS for it in one.machines)):
        sources = dict(load_machine(name).sources)
        assert not any("tokens/s" in text or "DeepSpeed" in text for text in sources.values())
    assert [sum(len(cell.rows) for cell in CELLS if cell.source == name) for name in (TABLES, FIGURE_7)] == [20, 22]


def test_pairs_in_order():
    cell = next(cell for cell in CELLS if cell.title.startswith("summarization, S1"))
    assert pairs_in_order(cell, [2, 3, 1, 4]) == (6, 6)
    assert pairs_in_order(cell, [3, 2, 1, 4]) == (5, 6)


def test_from_data_sheets_nothing_is_left_that_was_measured():
    machine = as_printed(load_machine("paper-s2"))
    device = machine.level("device")
    assert (device.processor.measured("experts", "float16"), device.processor.default_efficiency) == ([], 1.0)
    host = machine.level("ram").processor
    assert (host.measured("attention", "float32"), host.default_efficiency) == ([], 1.0)
    assert device.read_bytes_per_s == 300e9 * 15 / 16
    assert device.processor.peak("float16") == pytest.approx(121e12 * 795 / 2040)
    for source, target in (("ram", "device"), ("pinned", "device"), ("device", "ram")):
        assert machine.link(source, target).bytes_per_s(1 << 14) == pytest.approx(13.62e9, rel=1e-3)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(32, 12.2), (64, 12.3), (128, 12.5), (256, 13.0)])
def test_experts_on_the_l4_take_as_long_as_figure_9_measured(tokens, milliseconds):
    device = with_kernels(load_machine("paper-s2"), LIGHTNING_KERNELS).level(DEVICE)
    assert work_seconds(device, MIXTRAL.experts(tokens)) == pytest.approx(milliseconds * 1e-3, rel=0.01)


@pytest.mark.parametrize("tokens", [4, 36])
def test_experts_on_the_t4_compute_whole_tiles_after_they_are_read(tokens):
    device = with_kernels(load_machine("paper-s1"), LIGHTNING_KERNELS).level(DEVICE)
    used = 8 * (1 - 0.75**tokens)
    tile = 16 if 2 * tokens <= 8 else 64
    values = used * 3 * 4096 * 14336
    seconds = 2 * values / (0.69 * 320e9) + 2 * tile * values / (0.37 * 65e12 * 0.52)
    assert work_seconds(device, MIXTRAL.experts(tokens)) == pytest.approx(seconds, rel=0.02)


def test_attention_of_flexgen_moves_the_bytes_of_its_copies():
    plain, machine = load_machine("paper-s2"), with_kernels(load_machine("paper-s2"), FLEXGEN_KERNELS)
    work = MIXTRAL.decode_attention(64, 1000)
    for level, moved, share in (("device", 34, 0.77), ("ram", 110, 0.8)):
        seconds = work.num_bytes / 2 * moved / (plain.level(level).read_bytes_per_s * share)
        assert work_seconds(machine.level(level), work) == pytest.approx(seconds, rel=0.01)


def test_nothing_of_flexgens_loop_reaches_beyond_a_micro_batch():
    """A layer's weights are one transfer, and the next kernels wait for all tasks of the last micro-batch."""
    tasks = list(checked(flexgen_loop(2, 3)))
    ends = [task for task in tasks if task.op in ("device_attention", "post_attention")]
    for end in ends:
        later = [task for task in tasks if task.id > end.id and task.op in ("pre_attention", "post_attention")]
        assert all(end.id in task.after for task in later[:1])
    counts = {op: sum(task.op == op for task in tasks) for op in ("weights_to_device", "load_kv", "post_attention")}
    assert counts == {"weights_to_device": 2, "load_kv": 6, "post_attention": 6}
    on_host = list(checked(flexgen_host_loop(2, 3)))
    assert sum(task.op == "cpu_attention" for task in on_host) == 6
    assert not any(task.op == "load_kv" for task in on_host)


def test_a_tile_of_experts_waits_for_the_cache_of_an_l4():
    """A tile of 64 x 64 needs a byte for 32 operations, and the cache has 18 bytes a cycle and multiprocessor."""
    of_cache, plain = (
        with_kernels(load_machine("paper-s2"), replace(LIGHTNING_KERNELS, waits_for_cache=it)).level(DEVICE)
        for it in (True, False)
    )
    work = MIXTRAL.experts(10_000)
    share = work_seconds(plain, work) / work_seconds(of_cache, work)
    assert share == pytest.approx(18 * 32 / 1024, rel=0.01)
    assert work_seconds(plain, work) == pytest.approx(work.num_flops / (0.44 * 121e12), rel=0.01)


def test_whole_experts_that_stay_on_a_device():
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2  # bytes of projections
    assert resident_share(MIXTRAL, 0) * MIXTRAL.layers_bytes == pytest.approx(attention, rel=0.01)
    one = resident_share(MIXTRAL, 1) - resident_share(MIXTRAL, 0)
    assert one * MIXTRAL.layers_bytes == pytest.approx(32 * 3 * 4096 * 14336 * 2)
    run = predict(CELLS[1], CELLS[1].rows[-1])
    assert run.policy.weights_on_device == resident_share(MIXTRAL, 0)
    assert predict(CELLS[1], CELLS[1].rows[1]).policy.weights_on_device == 0.14  # FlexGen's own


@pytest.mark.thorough  # some seconds for tens of thousands of tasks
@pytest.mark.parametrize(("source", "expected"), [(TABLES, 19), (FIGURE_7, 22), (UNPADDED, 4)])
def test_figures_are_predicted_in_order_and_most_within_the_bar(source, expected):
    within = 0
    for cell in (it for it in CELLS if it.source == source):
        predicted = [predict(cell, row).tokens_per_s for row in cell.rows]
        right, total = pairs_in_order(cell, predicted)
        assert right == total
        within += sum(abs(speed / row.tokens_per_s - 1) <= BAR for row, speed in zip(cell.rows, predicted, strict=True))
    assert within == expected


def test_terms_come_one_after_the_other():
    cell = CELLS[4]  # MTBench, S1
    flexgen = [predict(cell, cell.rows[1], terms).tokens_per_s for terms in range(1, 6)]
    assert sorted(flexgen, reverse=True) == flexgen
    lightning = [predict(cell, cell.rows[-1], terms).tokens_per_s for terms in (3, 5, len(TERMS))]
    assert sorted(lightning, reverse=True) == lightning


@pytest.mark.thorough
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.title) for cell in CELLS])
def test_from_data_sheets_no_system_is_predicted_to_be_slower_than_it_was(cell):
    assert all(predict(cell, row, 1).tokens_per_s > row.tokens_per_s for row in cell.rows)


def test_the_settings_of_several_devices_are_those_of_table_2():
    for one in SCALINGS:
        two, four = map(load_machine, one.machines)
        assert (two.num_devices, four.num_devices) == (2, 4)
        for machine in (two, four):
            assert machine.level("ram").capacity_bytes == 416e9
            assert machine.level("device").processor.name == "NVIDIA T4"
        times = [four.tokens_per_s / two.tokens_per_s for _, two, four in one.rows]
        assert (min(times), max(times)) == pytest.approx(one.published, rel=0.02)


@pytest.mark.thorough  # twelve seconds
def test_13_of_16_figures_of_several_devices_are_within_the_bar():
    off = [
        ours / theirs - 1 for one in scaling() for ours, theirs in zip(one["predicted"], one["published"], strict=True)
    ]
    assert (sum(abs(it) <= BAR for it in off), len(off)) == (13, 16)


@pytest.mark.thorough  # some seconds a point: the corners of the figure
def test_what_the_paper_says_of_figure_10_holds():
    points = list(case_study((100, 300, 500), (1, 8)))
    assert all(holds(points) for holds in STATEMENTS.values())


def test_equation_9_compares_the_hosts_memory_with_the_link():
    """4 query heads share a key and a value of 2 bytes each: 4 FLOP a byte, which no host's peak bounds."""
    assert host_is_ahead(two_a100s(100e9, 2))
    assert not host_is_ahead(two_a100s(300e9, 2))


def test_the_machine_of_figure_10_is_the_published_one():
    machine = two_a100s(300e9, 2)
    ram = machine.level("ram")
    assert (ram.capacity_bytes, ram.read_bytes_per_s, ram.processor.peak("float32")) == (400e9, 200e9, 3.2e12)
    assert machine.level("device").capacity_bytes == 80e9
    assert (machine.num_devices, machine.link("ram", "device").peak_bytes_per_s) == (2, 300e9)
