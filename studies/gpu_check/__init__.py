"""Checks a machine with one NVIDIA GPU, and writes one JSON file and one table. Each step has a process of its own.

A step that fails or hangs leaves the others their turn. The file is rewritten after each step, and holds what an ended
step had found. `scripts/gpu-check resident` is about a model that fits on the GPU, in under eight minutes:

    kernels    every Triton kernel against torch in float64
    families   tokens of tiny models of 20 families against the processor's, with and without CUDA graphs
    decode     layers of Qwen3-30B-A3B's shape beside transformers, and beside reading the weights once
    attention  decode attention over long contexts beside torch's
    experts    the layer of experts beside torch's grouped products
    prompt     a prompt of 4,096 tokens
    loading    how fast weights get onto the GPU

`scripts/gpu-check pipelines` is about one that does not fit, in under ten minutes:

    speeds     the GPU's memory, arithmetic and link
    tokens     every pipeline on a small model, in float32 and bfloat16, against the plain run on the processor
    overlap    whether copies to the GPU and its computing take place at once, by CUDA events on their streams
    hollow     writes a Mixtral 8x7B whose experts are holes; a narrower one where main memory is too small
    pipelines  `studies/pipelines.py` on it, once for each size of the GPU's memory

Both need torch, transformers (and with it click, rich, numpy and tokenizers) and safetensors. `resident` needs Triton,
too. `stand_ins.py` replaces other packages that are missing. Without a GPU the steps are listed.
`--device softgpu` rehearses the steps of `resident` in software, with tiny sizes.
"""

from studies import stand_ins

STAND_INS = stand_ins.install()
