"""Which experts come next: predictors that only order prefetches, and the governor that asks whether they pay."""
