"""Devices of the asynchronous study, as threads: all forms give the bits of one loop, and reads are counted by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from studies.asynchronous.__main__ import expected
from studies.asynchronous.case import Case, Shape, Speeds
from studies.asynchronous.device import BY_EXPERT, EACH, FORMS, HALVES, MERGED, ROUNDS, TOGETHER, Device

CASE = Case(
    shape=Shape(num_layers=3, num_experts=6, top_k=2, hidden=8, width=16),
    num_devices=3,
    num_batches=2,
    batch_size=5,
    skew=0.7,
    scale=1.0,
)


def run_all(case, folder, forms):
    """Return what each device measured, by form."""
    with ThreadPoolExecutor(case.num_devices) as threads, ExitStack() as undo:
        devices = [undo.enter_context(closing(Device(case, it, str(folder)))) for it in range(case.num_devices)]
        return {form: list(threads.map(lambda device, form=form: device.run(form), devices)) for form in forms}


def pairs_of(case, layer, batches, device):
    """Return the experts of a device that these batches choose, pair by pair."""
    per_device = case.shape.num_experts // case.num_devices
    return [
        expert
        for batch in batches
        for token in case.topk_ids(layer, batch).tolist()
        for expert in token
        if expert // per_device == device
    ]


@pytest.mark.parametrize("is_lasting", [False, True])
def test_all_forms_give_the_bits_of_one_loop(tmp_path, is_lasting):
    case = Case(**{name: getattr(CASE, name) for name in CASE.__struct_fields__} | {"is_lasting": is_lasting})
    found = run_all(case, tmp_path, FORMS)
    for form in FORMS:
        assert [went.digest for went in found[form]] == expected(case)
        assert max(went.wall_s for went in found[form]) >= case.least_s()  # no form is below the floor
    tasks = {form: sum(went.num_tasks for went in each) for form, each in found.items()}
    devices, layers, every = range(3), range(3), range(6)
    alone = [pairs_of(case, layer, [batch], it) for layer in layers for batch in every for it in devices]
    rounds = [pairs_of(case, layer, part, it) for layer in layers for part in ((0, 1, 2), (3, 4, 5)) for it in devices]
    at_once = [pairs_of(case, layer, every, it) for layer in layers for it in devices]
    assert tasks[EACH] == sum(map(bool, alone))
    assert tasks[ROUNDS] == sum(map(bool, rounds))
    assert tasks[TOGETHER] == sum(map(bool, at_once))
    assert tasks[TOGETHER] <= tasks[MERGED] <= tasks[EACH]
    assert sum(len(set(ids)) for ids in at_once) <= tasks[BY_EXPERT] <= sum(len(set(ids)) for ids in alone)
    assert tasks[HALVES] >= tasks[TOGETHER]


def test_work_is_reading_or_computing_by_the_roofline():
    shape, speeds = CASE.shape, Speeds(launch_s=0.5)
    case = Case(shape=shape, speeds=speeds)
    values = 2 * 8 * 16
    few, many = np.array([1, 1, 4]), np.zeros(10**6, int)
    assert case.experts_s(few) == pytest.approx(0.5 + 2 * values * 4 / 2.5e11)  # of experts 1 and 4
    assert case.experts_s(many) == pytest.approx(0.5 + 2 * values * 10**6 / 6e12)
    assert case.experts_s(few[:0]) == 0.0
    others = 8 * 8 * 8 + values
    assert case.attention_s(1) == pytest.approx(0.5 + others * 4 / 2.5e11)


def test_the_floor_is_the_slowest_devices_work_with_weights_read_once():
    work = [0.0] * 3
    for layer in range(3):
        for device in range(3):
            ids = np.array(pairs_of(CASE, layer, range(6), device))
            work[device] += CASE.attention_s(10) + CASE.experts_s(ids)
    assert CASE.least_s() == pytest.approx(max(work))


def test_hot_experts_change_their_device_from_layer_to_layer_and_loads_place_them_evenly():
    wide = Case(shape=Shape(num_layers=4, num_experts=40), batch_size=4000, skew=0.6)
    per_layer = [np.bincount(wide.topk_ids(layer, 0).ravel() // 10, minlength=4) / 4000 for layer in range(4)]
    assert [int(loads.argmax()) for loads in per_layer] == [0, 1, 2, 3]
    assert all(loads.max() > 0.6 for loads in per_layer)
    placed = Case(shape=wide.shape, batch_size=4000, skew=0.6, by_load=True)
    for layer in range(4):
        loads = np.bincount(placed.device_of[layer][placed.topk_ids(layer, 0).ravel()], minlength=4) / 4000
        assert loads.max() < 0.3
