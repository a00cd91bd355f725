"""The catalogue of rules, one per file, and the order in which they run.

te_transform/pipeline.py adds the rules of extras.
"""

from te_transform.passes import (
    attention,
    chunked_loss,
    cross_entropy,
    layernorm_linear,
    layernorm_mlp,
    linear,
    merge_siblings,
    pad_vocabulary,
    rotary,
    wide_linear,
)

CATALOGUE = (
    # first: q, k, v and gate, up become one linear, as in the fused modules
    merge_siblings.RULE,
    rotary.RULE,  # before attention: it looks at attention's queries and keys for other forms of rotation
    attention.RULE,  # matches no linear, so its position is free: next to its projections
    chunked_loss.RULE,  # before the rules that would fuse its linear; off by default
    pad_vocabulary.RULE,  # before the rules that would fuse its linear; off by default
    layernorm_mlp.RULE,  # before layernorm_linear, which would fuse its norm and first linear
    layernorm_linear.RULE,  # before linear, which would fuse its linear
    wide_linear.RULE,  # matches no op of another rule, so its position is free: next to the other linears
    linear.RULE,  # all remaining linears
    cross_entropy.RULE,  # last, as in the model
)
