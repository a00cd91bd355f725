"""Profile a training or inference step by the model's modules, and find what slows it down: an extra."""
