"""The linear layer: three products, what is saved between them, tensor parallelism."""
