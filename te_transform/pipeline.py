"""The rules that run by default: the catalogue, and the rule of the extra experts/."""

from te_transform.experts import rule as experts
from te_transform.passes import CATALOGUE, attention

_NEXT = CATALOGUE.index(attention.RULE) + 1
# the products of experts are not linears, so the position of their rule is free: next to attention
PIPELINE = (*CATALOGUE[:_NEXT], experts.RULE, *CATALOGUE[_NEXT:])
