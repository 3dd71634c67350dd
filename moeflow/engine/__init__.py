"""Turns requests into tokens: the step loop, the model runner, the sampler, text in and out."""
