"""Compare a site, or a whole converted model, with the original, both against fp64."""
