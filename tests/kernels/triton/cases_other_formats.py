"""The product kernels with the other formats of files' blocks, each unpacked like one of `cases_planar_formats`."""

from tests.kernels.triton.expert_shapes import A3B, layer, products

CASES = [
    case
    for weight_format in ("int8-g128", "fp8", "q5_k", "q6_k")
    for num_tokens, capability in ((1, 75), (16, 80), (512, 90), (4096, 89))
    for case in products(layer(A3B, num_tokens, weight_format, capability))
]
