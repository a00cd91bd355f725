"""A linear that nothing else fused becomes the backend's Linear."""

from collections.abc import Iterator

from torch import nn

from te_transform.pattern import Linear
from te_transform.rule import Operation, Rule
from te_transform.weights import Same


def refuse(linear: Operation) -> Iterator[str]:
    """No reason of its own: every linear is one."""
    yield from ()


def build(backend, linear: Operation) -> nn.Module:
    """The same linear."""
    out_features, in_features = linear.weight.shape
    return backend.Linear(
        in_features,
        out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
    )


RULE = Rule(
    name="linear",
    pattern=Linear(),
    refuse=refuse,
    build=build,
    weights=(Same("linear.weight", "fused.weight"), Same("linear.bias", "fused.bias")),
)
"""What FP8 needs: the matrix product runs in the recipe's precision. In plain PyTorch it changes nothing."""
