"""FP8: products, scales, amax histories, quantized weights and gradient sums, in one registry."""
