"""A run's config: every option with its default and its rule, checked at the start."""
