"""The training program: config, data, launch, training loop and checkpoints."""
