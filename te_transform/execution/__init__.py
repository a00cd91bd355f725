"""What a converted model carries: its captured forward, and what belongs to its parameters."""
