"""Prediction of the experts that layers need next, and trials that measure whether prefetching by it pays."""
