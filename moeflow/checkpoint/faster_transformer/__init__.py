"""Checkpoints as FasterTransformer takes them: config.ini and a file of bare numbers for each tensor."""
