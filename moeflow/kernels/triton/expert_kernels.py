"""Kernels of the expert layer. Each of the three product kernels computes gates and ups, and again downs.

A *pair* is a token and one of its choices, number `token * top_k + choice`. A product kernel reads row
`pair // rows_share` of x [rows, size] and writes row `pair` of out [pairs, num_outputs]. It adds the same row of a
residual. With a gate, rows `num_outputs ..` of a matrix are the ups. `stop` is `size` as a number: compilers unroll
loops of constant length.

Inputs of experts `first_shared ..` lie `shared_rows` rows further in x.

An expert is computed if it is one of `first .. last - 1` and has a slot: `slots` [E] int32 (negative: none), without a
table its own number. Pairs of other experts read no weights, and nothing is written for them.

Sources: ExpertFlow, algorithms 5.2 to 5.4 (indices move, rows of x do not; a range of experts for each device).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeflow.kernels.triton.norm import normalised
from moeflow.kernels.triton.weight_tiles import activate, load_scales, load_values, load_weights


@triton.jit
def slot_of(expert, slots_ptr, first, last, has_slots: tl.constexpr):
    """Return where the matrices of experts lie, negative: they are not computed here."""
    is_here = (expert >= first) & (expert < last)
    if has_slots:
        return tl.load(slots_ptr + expert, mask=is_here, other=-1)
    return tl.where(is_here, expert.to(tl.int32), -1)


@triton.jit
def group_sums(
    x,
    values_ptr,
    scales_ptr,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return products of x [block_k] and rows of weights, summed by `group` columns: [block_n, block_k / group].

    Most groups are the columns that one thread loads at a time, so their sums take no exchange between threads.
    """
    values = load_values(values_ptr, rows, start, num_rows, size, value_row, weight_format, block_n, block_k, is_even)
    inner: tl.constexpr = group if group < block_k else block_k
    products = tl.reshape(values.to(tl.float32) * x[None, :], (block_n, block_k // inner, inner))
    sums = tl.sum(products, axis=2)
    if weight_format != "float":
        scales, offsets = load_scales(
            scales_ptr, rows, start, num_rows, size, scale_row, weight_format, group, inner, block_k, is_even
        )
        sums *= scales
        if (
            weight_format == "q4_k"
            or weight_format == "q5_k"
            or weight_format == "int4-zero"
            or weight_format == "int8-zero"
        ):
            sums += offsets * tl.sum(tl.reshape(x, (block_k // inner, inner)), axis=1)[None, :]
    return sums


@triton.jit
def pair_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    value_stride,
    scale_stride,
    alpha,
    limit,
    stop,
    ids_ptr,
    slots_ptr,
    first,
    last,
    first_shared,
    shared_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    rows_share: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    has_ids: tl.constexpr,
    has_slots: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Compute `block_n` outputs of pair `program_id(0)` without tensor cores. Without ids there is one matrix."""
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair) if has_ids else 0
    slot = slot_of(expert, slots_ptr, first, last, has_slots).to(tl.int64) if has_ids else pair.to(tl.int64) * 0
    if slot < 0:
        return
    values_ptr += slot * value_stride
    scales_ptr += slot * scale_stride
    rows = tl.program_id(1) * block_n + tl.arange(0, block_n)
    row = pair // rows_share
    if has_ids:
        row += tl.where(expert >= first_shared, shared_rows, 0)
    x_ptr += row.to(tl.int64) * size
    columns = tl.arange(0, block_k)
    inner: tl.constexpr = group if group < block_k else block_k
    sums = tl.zeros((block_n, block_k // inner), tl.float32)
    more_sums = tl.zeros((block_n, block_k // inner), tl.float32)
    for start in range(0, stop, block_k):
        if is_even:
            x = tl.load(x_ptr + start + columns).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + columns, mask=start + columns < size, other=0.0).to(tl.float32)
        sums += group_sums(
            x,
            values_ptr,
            scales_ptr,
            rows,
            start,
            num_outputs,
            size,
            value_row,
            scale_row,
            weight_format,
            group,
            block_n,
            block_k,
            is_even,
        )
        if is_gated:
            more_sums += group_sums(
                x,
                values_ptr + num_outputs * value_row,
                scales_ptr + num_outputs * scale_row,
                rows,
                start,
                num_outputs,
                size,
                value_row,
                scale_row,
                weight_format,
                group,
                block_n,
                block_k,
                is_even,
            )
    gate, up = tl.sum(sums, axis=1), tl.sum(more_sums, axis=1)
    is_inside = rows < num_outputs
    if has_bias:
        bias_ptr += expert * num_outputs * (2 if is_gated else 1)
        gate += tl.load(bias_ptr + rows, mask=is_inside, other=0.0)
        if is_gated:
            up += tl.load(bias_ptr + num_outputs + rows, mask=is_inside, other=0.0)
    y = activate(gate, up, alpha, limit, function, is_gated)
    places = pair.to(tl.int64) * num_outputs + rows
    if has_residual:
        y += tl.load(residual_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def compute_tile(
    pairs,
    is_pair,
    expert,
    slot,
    block,
    shift,
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    value_stride,
    scale_stride,
    alpha,
    limit,
    stop,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    rows_share: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Compute and store block number `block` of the outputs of up to `block_m` pairs of one expert.

    Their inputs lie `shift` rows further than those of experts in general.
    """
    values_ptr += slot.to(tl.int64) * value_stride
    scales_ptr += slot.to(tl.int64) * scale_stride
    rows = block * block_n + tl.arange(0, block_n)
    columns = tl.arange(0, block_k)
    x_rows = x_ptr + (pairs // rows_share + shift).to(tl.int64)[:, None] * size
    gate = tl.zeros((block_m, block_n), tl.float32)
    up = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, stop, block_k):
        if is_even:
            x = tl.load(x_rows + (start + columns)[None, :], mask=is_pair[:, None], other=0.0)
        else:
            is_inside = is_pair[:, None] & ((start + columns) < size)[None, :]
            x = tl.load(x_rows + (start + columns)[None, :], mask=is_inside, other=0.0)
        weights = load_weights(
            values_ptr,
            scales_ptr,
            rows,
            start,
            num_outputs,
            size,
            value_row,
            scale_row,
            weight_format,
            group,
            block_n,
            block_k,
            is_even,
        )
        gate = tl.dot(x, tl.trans(weights.to(x.dtype)), gate, input_precision="ieee")
        if is_gated:
            weights = load_weights(
                values_ptr + num_outputs * value_row,
                scales_ptr + num_outputs * scale_row,
                rows,
                start,
                num_outputs,
                size,
                value_row,
                scale_row,
                weight_format,
                group,
                block_n,
                block_k,
                is_even,
            )
            up = tl.dot(x, tl.trans(weights.to(x.dtype)), up, input_precision="ieee")
    is_output = rows < num_outputs
    if has_bias:
        bias_ptr += expert * num_outputs * (2 if is_gated else 1)
        gate += tl.load(bias_ptr + rows, mask=is_output, other=0.0)[None, :]
        if is_gated:
            up += tl.load(bias_ptr + num_outputs + rows, mask=is_output, other=0.0)[None, :]
    y = activate(gate, up, alpha, limit, function, is_gated)
    places = pairs.to(tl.int64)[:, None] * num_outputs + rows[None, :]
    is_inside = is_pair[:, None] & is_output[None, :]
    if has_residual:
        y += tl.load(residual_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def expert_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    value_stride,
    scale_stride,
    alpha,
    limit,
    stop,
    ids_ptr,
    slots_ptr,
    num_pairs,
    first,
    last,
    first_shared,
    shared_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    rows_share: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    has_slots: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block_pairs: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Compute `block_n` outputs of the pairs of expert `program_id(1)`, of at most `block_pairs` in all.

    The program looks for its pairs in all ids, which takes a few registers a thread instead of a launch that sorts.
    Chunks after the first find the weights in the cache.
    """
    expert = tl.program_id(1)
    pairs = tl.arange(0, block_pairs)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_mine = (ids == expert).to(tl.int32)
    count = tl.sum(is_mine, axis=0)
    slot = slot_of(expert, slots_ptr, first, last, has_slots)
    if (count == 0) | (slot < 0):
        return
    ranks = tl.where(is_mine > 0, tl.cumsum(is_mine, axis=0) - 1, -1)
    for chunk in range(0, count, block_m):
        wanted = chunk + tl.arange(0, block_m)
        found = tl.sum(tl.where(ranks[None, :] == wanted[:, None], pairs[None, :], 0), axis=1)
        compute_tile(
            found,
            wanted < count,
            expert,
            slot,
            tl.program_id(0),
            tl.where(expert >= first_shared, shared_rows, 0),
            x_ptr,
            values_ptr,
            scales_ptr,
            bias_ptr,
            residual_ptr,
            out_ptr,
            value_stride,
            scale_stride,
            alpha,
            limit,
            stop,
            num_outputs,
            size,
            value_row,
            scale_row,
            rows_share,
            function,
            is_gated,
            weight_format,
            group,
            has_bias,
            has_residual,
            block_m,
            block_n,
            block_k,
            is_even,
        )


@triton.jit
def sort_kernel(
    ids_ptr,
    slots_ptr,
    order_ptr,
    spans_ptr,
    num_pairs,
    num_experts,
    first,
    last,
    has_slots: tl.constexpr,
    block: tl.constexpr,
):
    """Write the pairs of expert `program_id(0)` in ascending order to their place in order [pairs] int32.

    spans [2, num_experts] int32 gets where they begin and how many they are, 0 if the expert is not computed here.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, block)
    lower = tl.zeros((block,), tl.int32)
    for base in range(0, num_pairs, block):
        ids = tl.load(ids_ptr + base + places, mask=base + places < num_pairs, other=num_experts)
        lower += (ids < expert).to(tl.int32)
    start = tl.sum(lower, axis=0)
    count = 0
    for base in range(0, num_pairs, block):
        ids = tl.load(ids_ptr + base + places, mask=base + places < num_pairs, other=num_experts)
        is_mine = (ids == expert).to(tl.int32)
        ranks = tl.cumsum(is_mine, axis=0) - 1
        tl.store(order_ptr + start + count + ranks, base + places, mask=is_mine > 0)
        count += tl.sum(is_mine, axis=0)
    slot = slot_of(expert, slots_ptr, first, last, has_slots)
    tl.store(spans_ptr + expert, start)
    tl.store(spans_ptr + num_experts + expert, tl.where(slot < 0, 0, count))


@triton.jit
def tile_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    value_stride,
    scale_stride,
    alpha,
    limit,
    stop,
    slots_ptr,
    order_ptr,
    spans_ptr,
    num_pairs,
    num_experts,
    first_shared,
    shared_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    rows_share: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    is_sorted: tl.constexpr,
    has_slots: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block_experts: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Compute `block_n` outputs of tile `program_id(0)` of the sorted pairs, each tile of one expert.

    There may be more programs than tiles: the last ones have nothing to do. Not sorted, all rows meet one matrix.
    """
    tile = tl.program_id(0)
    if is_sorted:
        experts = tl.arange(0, block_experts)
        counts = tl.load(spans_ptr + num_experts + experts, mask=experts < num_experts, other=0)
        tiles = (counts + block_m - 1) // block_m
        ends = tl.cumsum(tiles, axis=0)
        expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
        if expert >= num_experts:
            return
        tile -= tl.sum(tl.where(experts == expert, ends - tiles, 0), axis=0)
        slot = tl.load(slots_ptr + expert) if has_slots else expert
        places = tile * block_m + tl.arange(0, block_m)
        is_pair = places < tl.load(spans_ptr + num_experts + expert)
        pairs = tl.load(order_ptr + tl.load(spans_ptr + expert) + places, mask=is_pair, other=0)
    else:
        expert = tile * 0
        slot = expert
        pairs = tile * block_m + tl.arange(0, block_m)
        is_pair = pairs < num_pairs
    compute_tile(
        pairs,
        is_pair,
        expert,
        slot,
        tl.program_id(1),
        tl.where(expert >= first_shared, shared_rows, 0),
        x_ptr,
        values_ptr,
        scales_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        value_stride,
        scale_stride,
        alpha,
        limit,
        stop,
        num_outputs,
        size,
        value_row,
        scale_row,
        rows_share,
        function,
        is_gated,
        weight_format,
        group,
        has_bias,
        has_residual,
        block_m,
        block_n,
        block_k,
        is_even,
    )


@triton.jit
def sum_kernel(
    results_ptr,
    ids_ptr,
    weights_ptr,
    slots_ptr,
    residual_ptr,
    out_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    normed_ptr,
    eps,
    first,
    last,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    is_summed: tl.constexpr,
    has_slots: tl.constexpr,
    has_residual: tl.constexpr,
    has_norm: tl.constexpr,
    subtracts_mean: tl.constexpr,
    has_norm_bias: tl.constexpr,
    block: tl.constexpr,
):
    """Weigh results [T, top_k, hidden] of token `program_id(0)`, 0 for experts that are not computed here.

    Summed in the router's order, out is [T, hidden], with a residual of that shape added; else [T, top_k, hidden].
    With a norm a block is a row, and the normalised sum is stored, too.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < hidden
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(top_k):
        pair = token * top_k + choice
        slot = slot_of(tl.load(ids_ptr + pair), slots_ptr, first, last, has_slots)
        size = tl.where(slot < 0, 0, hidden)
        row = tl.load(results_ptr + pair * hidden + columns, mask=columns < size, other=0.0).to(tl.float32)
        row = tl.where(columns < size, row * tl.load(weights_ptr + pair), 0.0)
        if is_summed:
            total += row
        else:
            tl.store(out_ptr + pair * hidden + columns, row, mask=is_inside)
    if is_summed:
        if has_residual:
            total += tl.load(residual_ptr + token * hidden + columns, mask=is_inside, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * hidden + columns, total, mask=is_inside)
        if has_norm:
            total = total.to(tl.float32)
            normed = normalised(
                total, norm_weight_ptr, norm_bias_ptr, columns, is_inside, hidden, eps, subtracts_mean, has_norm_bias
            )
            tl.store(normed_ptr + token * hidden + columns, normed.to(normed_ptr.dtype.element_ty), mask=is_inside)
