"""A run's health: hangs, slow ranks, NaN and Inf, loss spikes."""
