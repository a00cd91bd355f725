"""te_transform: any PyTorch transformer on fused modules, with the same weights and the same answers."""
