"""The kernels of the expert layer with int8 and int4, and with one int4 matrix, for Qwen3-30B-A3B and Mixtral."""

from tests.kernels.triton.expert_shapes import A3B, MIXTRAL, layer, matrix, products

TOKENS = (1, 16, 4096)  # for the three forms
CASES = [
    *products(layer(A3B, 1, "int4", 75)),
    *(
        case
        for weight_format, capability in (("int8", 90), ("int4", 80), ("int4", 90))
        for num_tokens in TOKENS
        for case in products(layer(A3B, num_tokens, weight_format, capability))
    ),
    *products(layer(MIXTRAL, 1, "int4", 90)),
    *(
        case
        for num_tokens, capability in ((1, 75), (1, 90), (16, 80), (512, 89), (512, 90))
        for case in matrix(A3B, num_tokens, "int4", capability)
    ),
]
