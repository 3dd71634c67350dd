"""The product kernels with weights of files' blocks, and with routers in float32, for Qwen3-30B-A3B."""

from tests.kernels.triton.expert_shapes import A3B, layer, products, router

CASES = [
    *(
        case
        for weight_format in ("int4-g128", "mxfp4", "q4_k")  # unpacked in three ways
        for num_tokens, capability in ((1, 75), (16, 80), (512, 90), (4096, 90))
        for case in products(layer(A3B, num_tokens, weight_format, capability))
    ),
    *(case for num_tokens, capability in ((1, 75), (16, 90)) for case in router(A3B, num_tokens, capability)),
]
