"""What an iteration knows of FP8: amaxes, health, histories and scales, settled once; phases, graphs, loss scaling."""
