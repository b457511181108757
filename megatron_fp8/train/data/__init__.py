"""From text to batches: tokenised once, checked when read, in an order that any layout shares."""
