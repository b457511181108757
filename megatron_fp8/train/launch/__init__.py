"""From processes to ranks: found, met, agreed on one run, and laid out in parallel groups."""
