"""The rule for experts of mixture models, an extra: its forms, its fused ops and its kernels."""
