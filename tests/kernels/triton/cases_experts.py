"""The kernels of the expert layer for Qwen3-30B-A3B and Mixtral: floats, int8 and int4."""

from tests.kernels.triton.expert_shapes import A3B, MIXTRAL, layer, products

CASES = [
    *layer(A3B, 4096, "bfloat16", 90),
    *(
        case
        for weight_format, capability in (
            *(("bfloat16", capability) for capability in (80, 89, 90)),
            *((integers, capability) for integers in ("int8", "int4") for capability in (80, 90)),
            ("float32", 90),
        )
        for num_tokens in (1, 16, 4096)
        for case in products(layer(A3B, num_tokens, weight_format, capability))
    ),
    *(
        case
        for weight_format in ("bfloat16", "int4")
        for num_tokens in (1, 16, 4096)
        for case in products(layer(MIXTRAL, num_tokens, weight_format, 90))
    ),
    *layer(A3B, 1, "int4", 75),
    *(case for num_tokens in (1, 16, 4096) for case in layer(A3B, num_tokens, "float16", 75)),
]
