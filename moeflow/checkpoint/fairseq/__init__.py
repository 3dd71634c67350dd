"""Checkpoints of fairseq: settings and dense weights in one file, experts in one for each rank that trained them."""
