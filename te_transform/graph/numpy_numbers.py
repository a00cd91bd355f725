"""Numpy's numbers, such as np.float64(2), and its arrays without dimensions, which dynamo confuses.

A number has another class than an array, and a hash. An array may change the dtype of a product with a
tensor. A forward that asks for the class or the hash, or reads an array without dimensions, runs as the
user's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from te_transform.graph.dynamo_patches import Patch, call_before, leave_to_user


def numpy_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that answer for numpy numbers, with their wrappers."""
    yield VariableBuilder, "_wrap", call_before(_check_dimensions)  # dynamo caches wrap_numpy_ndarray()
    yield BuiltinVariable, "call_function", call_before(_check_class)
    for name in ("is_hashable", "is_python_hashable"):  # of PyTorch 2.13, and of 2.11
        if hasattr(NumpyNdarrayVariable, name):
            yield NumpyNdarrayVariable, name, call_before(_check_array)
    yield TorchInGraphFunctionVariable, "call_function", _no_tensor


def _check_dimensions(_: VariableBuilder, value: Any) -> None:
    if type(value).__name__ == "ndarray" and value.ndim == 0:
        leave_to_user(
            "it reads a numpy array without dimensions; hold float(array) or torch.from_numpy(array)"
        )


def _check_class(self: BuiltinVariable, _: Any, args: Any, *__: Any) -> None:
    if self.fn in (isinstance, type) and args and isinstance(args[0].realize(), NumpyNdarrayVariable):
        _check_array(args[0].realize())


def _check_array(asked: NumpyNdarrayVariable) -> None:
    """Leave an object without dimensions to the user's own code: it may be a number or an array."""
    if asked.ndim == 0:
        leave_to_user(
            "it asks for the class or the hash of a numpy number; hold float(number) or int(number)"
        )


def _no_tensor(own: Callable[..., Any]) -> Callable[..., Any]:
    """Answer torch.is_tensor() for numpy's arrays and numbers, which dynamo takes for tensors."""

    @functools.wraps(own)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_asked = self.value in (torch.is_tensor, torch.overrides.is_tensor_like) and len(args) == 1
        if is_asked and isinstance(args[0].realize(), NumpyNdarrayVariable):
            return ConstantVariable.create(False)
        return own(self, tx, args, kwargs)

    return call
