"""GPT with experts as Megatron and DeepSpeed save it: pickled tensors, a file for each tensor-parallel rank."""
