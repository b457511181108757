"""What a run's tensors and codes look like, measured while it trains. An observer: the linear knows nothing of it."""
