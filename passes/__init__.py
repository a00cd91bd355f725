"""The catalogue: one rewrite a file, and the order they run in."""

from te_transform.passes import attention, layernorm_linear, layernorm_mlp, linear, merge_siblings

PIPELINE = (
    # first: q, k, v and gate, up become one linear, which is what the fused modules hold
    merge_siblings.RULE,
    attention.RULE,  # reads no linear, any place would do: next to the projections it belongs to
    layernorm_mlp.RULE,  # before layernorm_linear, which would take its norm and first linear away
    layernorm_linear.RULE,  # before linear, which would take its linear away
    linear.RULE,  # last: whatever linear is left
)
