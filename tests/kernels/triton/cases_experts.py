"""The kernels of the expert layer with weights of floats, for Qwen3-30B-A3B and Mixtral."""

from tests.kernels.triton.expert_shapes import A3B, MIXTRAL, layer, normed_sum, products

TOKENS = (1, 16, 4096)  # for the three forms
CASES = [
    *(case for num_tokens in TOKENS for case in layer(A3B, num_tokens, "float16", 75)),
    *(
        case
        for capability in (80, 89, 90)
        for num_tokens in TOKENS
        for case in products(layer(A3B, num_tokens, "bfloat16", capability))
    ),
    *layer(A3B, 16, "float32", 90),
    *(case for capability in (75, 80, 89, 90) for case in normed_sum(2048, 8, capability)),
    *normed_sum(7168, 9, 90),
    *(case for num_tokens in TOKENS for case in products(layer(MIXTRAL, num_tokens, "bfloat16", 90))),
]
