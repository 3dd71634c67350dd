"""Checks a machine with one NVIDIA GPU, and writes one JSON file and one table. Each step has a process of its own.

A step that fails or hangs leaves the others their turn. The file is rewritten after each step, and holds what an ended
step had found. `scripts/gpu-check resident` runs models that fit on the GPU, in under eight minutes:

    kernels    Errors of every Triton kernel against torch in float64.
    families   Tokens of tiny models of many families against the CPU's, with and without CUDA graphs.
    decode     Speed of layers with Qwen3-30B-A3B's shape, as a ratio to transformers and to one reading of the weights.
    attention  Speed of decode attention over long contexts, as a ratio to torch.
    experts    Speed of the expert layer beside torch's grouped products, in both forms for long passes.
    prompt     Speed of a prompt of 4,096 tokens.
    loading    Speed of copying weights to the GPU.

`scripts/gpu-check hybrid` runs models that share their experts with the CPU, in under five minutes:

    seam       Microseconds of an exchange between GPU and CPU, also while experts move, beside its floor: a flag to the
               host, and a copy back.
    tokens     Tokens of tiny models against the CPU's, with none and half of the experts on the GPU.
    speed      Speed of layers with Qwen3-30B-A3B's shape, a quarter of the experts on the GPU, as a ratio to others.

`scripts/gpu-check pipelines` runs a model that does not fit, in under five minutes:

    overlap    Seconds of copying and computing at once, by CUDA events.
    tokens     Tokens of every pipeline with a small model against the CPU's, in float32 and bfloat16.
    hollow     Writes half of a Mixtral 8x7B's widths without stored experts, or less if main memory is too small.
    pipelines  Runs `studies/pipelines.py` on it, once for each size of the GPU's memory, divided like the weights.
    speeds     Rates of the GPU's memory, arithmetic and link.

`scripts/gpu-check all` runs the steps of all groups in 14 minutes, the most valuable first. A step for which no time is
left is named.

All need torch, transformers (and with it click, rich, numpy and tokenizers) and safetensors. `resident` and `hybrid`
need Triton, and `hybrid` the kernels for the CPU. `stand_ins.py` replaces other packages that are missing. Without a
GPU the steps are listed. `--device softgpu` rehearses in software, with tiny sizes: the steps of `resident` and
`hybrid`, and `tokens` and `overlap` of `pipelines`.
"""

from studies import stand_ins

STAND_INS = stand_ins.install()
