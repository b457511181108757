"""From processes to ranks: discovery, agreement, parallel groups."""
