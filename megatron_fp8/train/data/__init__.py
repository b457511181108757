"""From text to batches, in an order independent of the layout."""
