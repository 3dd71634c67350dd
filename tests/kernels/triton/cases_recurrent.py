"""Convolutions and gates of recurrent layers, as they are compiled for Qwen3-Next, LFM2 and Granite 4."""

from moeflow.kernels.triton.gates import gated_norm_kernel, sigmoid_gate_kernel
from moeflow.kernels.triton.short_conv import short_conv_kernel
from tests.kernels.triton.ahead_of_time import Case

CONV_POINTERS = ("x_ptr", "in_gate_ptr", "out_gate_ptr", "weight_ptr", "bias_ptr", "out_ptr")
CONV_ALIGNED = (*CONV_POINTERS, "slots_ptr", "sequences_ptr", "stores_ptr", "x_stride", "slot_stride")
GATE_ALIGNED = ("x_ptr", "x_stride", "gate_ptr", "gate_stride", "out_ptr")

CASES = (
    [
        Case(
            f"short convolution, {channels} channels, {token_block} tokens",
            short_conv_kernel,
            {
                **dict.fromkeys(CONV_POINTERS, "*bf16"),
                "slots_ptr": "*fp32",
                "sequences_ptr": "*i32",
                "stores_ptr": "*i32",
                **dict.fromkeys(("x_stride", "slot_stride", "num_sequences", "num_stores"), "i32"),
            },
            {
                "num_channels": channels,
                "num_taps": num_taps,
                "has_bias": False,
                "has_gates": has_gates,
                "has_silu": not has_gates,
                "kept_block": 4 if num_taps == 4 else 2,
                "token_block": token_block,
                "channel_block": 32,
            },
            CONV_ALIGNED,
            options={"num_warps": num_warps},
            has_wide_loads=token_block > 1,  # of one token a thread has one channel
        )
        for channels, num_taps, has_gates in ((8192, 4, False), (2048, 3, True))
        for token_block, num_warps in ((1, 1), (64, 4))
    ]
    + [
        Case(
            f"gated norm of {size}",
            gated_norm_kernel,
            {
                **dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16"),
                "weight_ptr": "*fp32",
                **dict.fromkeys(("x_stride", "gate_stride", "weight_stride"), "i32"),
                "eps": "fp32",
            },
            {"size": size, "is_gated_first": size > 128, "block": size},
            (*GATE_ALIGNED, "weight_ptr", "weight_stride"),
            options={"num_warps": min(size // 512 or 1, 8)},
        )
        for size in (128, 4096)
    ]
    + [
        Case(
            "sigmoid gate",
            sigmoid_gate_kernel,
            {
                **dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16"),
                **dict.fromkeys(("x_stride", "gate_stride", "size"), "i32"),
            },
            {"block": 1024},
            (*GATE_ALIGNED, "size"),
            options={"num_warps": 4},
        )
    ]
)
