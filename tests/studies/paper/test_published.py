"""What MoE-Lightning published is what predictions have to come near, but for the figures that went into them."""

from __future__ import annotations

import pytest

from moeflow.planner.hardware.machine_files import load_machine
from studies.paper.one_device import BAR, CELLS, as_printed, pairs_in_order, predict
from studies.paper.several_devices import GEN_LENS, SCALINGS, STATEMENTS, case_study, scaling, two_a100s

BEYOND_THE_BAR = ("FlexGen", 36, 14)  # with MoE-Lightning's policy: predicted 37% too fast

# Every figure that something was taken from, or whose system had to be assumed: (machine, system, micro-batch, from).
USED = {
    ("paper-s1", "DeepSpeed", 102),  # the link's 12 GB/s, table 4
    ("paper-s1", "DeepSpeed", 8),
    ("paper-s2", "DeepSpeed", 156),
    ("paper-s2", "DeepSpeed", 12),
    ("paper-s1", "MoE-Lightning(p)", 36),  # experts' share of the T4's roof, table 5
    ("paper-s2", "MoE-Lightning(p)", 100),  # of the L4's, table 4
    ("paper-s1", "FlexGen(c)", 32),  # 49 times the bytes: its attention was not measured
    ("paper-s1", "FlexGen(c)", 3),
    ("paper-s2", "FlexGen(c)", 64),
    ("paper-s2", "FlexGen(c)", 8),
}


def test_every_figure_that_was_used_is_named_and_does_not_count():
    rows = [(cell, row) for cell in CELLS for row in cell.rows]
    used = {(cell.machine, row.system.name, row.micro_batch) for cell, row in rows if not row.counts}
    assert used == USED
    assert (sum(row.counts for _, row in rows), len(rows)) == (10, 20)
    assert all(row.used_for for _, row in rows if row.system.slower)  # an assumption about a system is no prediction
    sources = {name: dict(load_machine(name).sources) for name in ("paper-s1", "paper-s2")}
    assert "30.12 tokens/s" in sources["paper-s1"]["device efficiencies"]
    assert "105.29 tokens/s" in sources["paper-s2"]["device efficiencies"]
    assert "DeepSpeed" in sources["paper-s2"]["ram to device"]


def test_pairs_in_order_are_those_of_figures_that_count():
    cell = next(cell for cell in CELLS if cell.title.startswith("summarization, S1"))  # FlexGen and MoE-Lightning(p)
    assert pairs_in_order(cell, [9, 1, 9, 2], all_count=False) == (1, 1)
    assert pairs_in_order(cell, [9, 2, 9, 1], all_count=False) == (0, 1)
    assert pairs_in_order(cell, [2, 3, 1, 4], all_count=True) == (6, 6)
    assert pairs_in_order(cell, [3, 2, 1, 4], all_count=True) == (5, 6)


def test_from_data_sheets_nothing_is_left_that_was_fitted():
    machine = as_printed(load_machine("paper-s2"))
    device = machine.level("device")
    assert (device.processor.measured("experts", "float16"), device.processor.default_efficiency) == ([], 1.0)
    host = machine.level("ram").processor
    assert (host.measured("attention", "float32"), host.default_efficiency) == ([], 1.0)
    assert device.read_bytes_per_s == 300e9 * 15 / 16
    assert device.processor.peak("float16") == pytest.approx(121e12 * 795 / 2040)
    assert machine.level("ram").read_bytes_per_s == 100e9
    for source, target in (("ram", "device"), ("pinned", "device"), ("device", "ram")):
        assert machine.link(source, target).bytes_per_s(1 << 14) == pytest.approx(13.62e9, rel=1e-3)


@pytest.mark.thorough  # some seconds for tens of thousands of tasks
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.title) for cell in CELLS])
def test_figures_that_count_are_predicted_in_order_and_within_the_bar(cell):
    predicted = [predict(cell, row).tokens_per_s for row in cell.rows]
    right, total = pairs_in_order(cell, predicted, all_count=False)
    assert right == total
    for row, speed in zip(cell.rows, predicted, strict=True):
        if row.counts and (row.system.name, row.micro_batch, row.num_micro_batches) != BEYOND_THE_BAR:
            assert speed == pytest.approx(row.tokens_per_s, rel=BAR), row.system.name


@pytest.mark.thorough
def test_one_figure_is_beyond_the_bar_as_the_page_says():
    cell = next(cell for cell in CELLS if cell.title.startswith("MTBench"))
    row = next(row for row in cell.rows if (row.system.name, row.micro_batch, row.num_micro_batches) == BEYOND_THE_BAR)
    assert row.counts
    assert BAR < predict(cell, row).tokens_per_s / row.tokens_per_s - 1 < 0.4


@pytest.mark.thorough
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.title) for cell in CELLS])
def test_from_data_sheets_no_system_is_predicted_to_be_slower_than_it_was(cell):
    printed = [predict(cell, row, from_data_sheets=True) for row in cell.rows]
    assert all(not run.slower for run in printed)
    assert all(run.tokens_per_s > row.tokens_per_s for row, run in zip(cell.rows, printed, strict=True))


def test_the_settings_of_several_devices_are_those_of_table_2():
    for one in SCALINGS:
        two, four = map(load_machine, one.machines)
        assert (two.num_devices, four.num_devices) == (2, 4)
        for machine in (two, four):
            assert machine.level("ram").capacity_bytes == 416e9
            assert machine.level("device").processor.name == "NVIDIA T4"
    assert GEN_LENS == (32, 64, 128, 256)


@pytest.mark.thorough  # eight searches
def test_four_t4s_scale_nearly_as_published_only_if_each_has_a_link_of_its_own():
    found = {
        (one["title"], one["links"]): one["tokens_per_s"][1] / one["tokens_per_s"][0] for one in scaling((128,), 1.5)
    }
    for one in SCALINGS:
        low, high = one.published
        assert 0.7 * low < found[one.title, "a link each"] < 1.2 * high
    assert found["8x22B, S6-S7", "shared link"] < 0.6 * SCALINGS[0].published[0]  # which the page says


@pytest.mark.thorough  # four searches: the corners of the figure
def test_nothing_the_paper_says_of_figure_10_holds_as_the_page_says():
    """The device attends: prompts that are computed one by one leave it the memory for many more sequences."""
    points = list(case_study((100, 500), (1, 8)))
    assert not any(holds(points) for holds in STATEMENTS.values())
    assert not any(point["attends_on_host"] for point in points)
    assert all(point["weights_on_host"] == 0 for point in points)


def test_the_machine_of_figure_10_is_the_published_one():
    machine = two_a100s(300e9, 2)
    ram = machine.level("ram")
    assert (ram.capacity_bytes, ram.read_bytes_per_s, ram.processor.peak("float32")) == (400e9, 200e9, 3.2e12)
    assert machine.level("device").capacity_bytes == 80e9
    assert (machine.num_devices, machine.link("ram", "device").peak_bytes_per_s) == (2, 300e9)
