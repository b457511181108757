"""FP8 state of an iteration: amaxes, health, histories, phases, graphs, loss scaling."""
