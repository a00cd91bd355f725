"""Judges: what a site, or a whole converted model, computes, against what the original computes in fp64."""
