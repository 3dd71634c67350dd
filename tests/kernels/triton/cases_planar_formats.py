"""The product kernels with weights of files' blocks, and with one quantized matrix, for Qwen3-30B-A3B."""

from tests.kernels.triton.expert_shapes import A3B, layer, matrix, products

CASES = [
    *(
        case
        for weight_format in ("int4-zero", "mxfp4", "fp8", "q4_k", "q6_k")
        for num_tokens, capability in ((1, 75), (1, 90), (16, 80), (4096, 80), (4096, 90))
        for case in products(layer(A3B, num_tokens, weight_format, capability))
    ),
    *(
        case
        for num_tokens, capability in ((1, 75), (1, 90), (16, 80), (16, 90), (512, 89), (512, 90))
        for case in matrix(A3B, num_tokens, "int4", capability)
    ),
]
