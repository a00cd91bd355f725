"""The catalogue: one rewrite a file, and the order they run in."""

from te_transform.passes import (
    attention,
    chunked_loss,
    cross_entropy,
    experts,
    layernorm_linear,
    layernorm_mlp,
    linear,
    merge_siblings,
    pad_vocabulary,
    rotary,
)

PIPELINE = (
    # first: q, k, v and gate, up become one linear, which is what the fused modules hold
    merge_siblings.RULE,
    rotary.RULE,  # before attention, whose queries and keys it reads for rotations in another form
    attention.RULE,  # reads no linear, any place would do: next to the projections it belongs to
    experts.RULE,  # its products are no linears, any place would do
    chunked_loss.RULE,  # before those that would take its linear away; off unless it is asked for
    pad_vocabulary.RULE,  # before those that would take its linear away; off unless it is asked for
    layernorm_mlp.RULE,  # before layernorm_linear, which would take its norm and first linear away
    layernorm_linear.RULE,  # before linear, which would take its linear away
    linear.RULE,  # whatever linear is left
    cross_entropy.RULE,  # last, as it is in the model
)
