"""Puts the most used expert of each layer on every rank, and assigns the others round-robin."""

import numpy as np

from moeflow.parallel.placement.placement import ExpertPlacement, Loads


def everywhere(loads: Loads, num_ranks: int) -> ExpertPlacement:
    """Return the ranks of each layer's experts: the other experts go to and fro over the ranks, by load."""
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    layers = []
    for layer in loads:
        most_used, *others = np.argsort(-layer, kind="stable").tolist()
        homes = {most_used: tuple(range(num_ranks))}
        for number, expert in enumerate(others):
            homes[expert] = (there_and_back[number % len(there_and_back)],)
        layers.append(tuple(homes[expert] for expert in range(len(layer))))
    return ExpertPlacement(num_ranks, tuple(layers))
