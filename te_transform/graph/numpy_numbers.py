"""Numpy's numbers, such as np.float64(2), and its arrays without dimensions, which dynamo confuses.

In a graph, both are tensors without dimensions. They differ in four ways:

- An array may change the dtype of a product with a tensor.
- A number counts as a Python number for PyTorch: the product of integers and np.float64(2) is float32.
- A number has another class than an array, and a hash.
- A graph returns arrays. A number has to become a number again.

A forward that reads or makes an array without dimensions, or asks for the class or the hash of a number, runs
as the user's own code. The same holds if a number changes the dtype of a result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._dynamo import utils
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, misc
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.node import map_arg

from te_transform.graph.dynamo_patches import Patch, around, call_after, call_before, leave_to_user
from te_transform.graph.nodes import dtype_name

_IS_NUMBER = "te_transform_numpy_number"  # in the meta of a node
_OF_NUMPY = (
    utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper,
)  # fmt: skip
_KEEP_DTYPE = (torch.tensor, torch.as_tensor, torch.asarray)
# In PyTorch, `x[0] = number` raises for other numbers, which are neither a float nor have an __index__().
_ASSIGNED = (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def numpy_patches() -> Iterator[Patch]:
    """Yield the dynamo methods that answer for numpy numbers, with their wrappers."""
    yield VariableBuilder, "_wrap", call_before(_check_dimensions)  # dynamo caches wrap_numpy_ndarray()
    yield NumpyNdarrayVariable, "__init__", call_after(_check_made)
    yield SubgraphTracer, "create_proxy", call_before(_check_dtype)
    yield PyCodegen, "load_import_from", around(_numbers_of_graphs)
    yield BuiltinVariable, "call_function", call_before(_check_class)
    for name in ("is_hashable", "is_python_hashable"):  # of PyTorch 2.13, and of 2.11
        if hasattr(NumpyNdarrayVariable, name):
            yield NumpyNdarrayVariable, name, call_before(_check_array)
    yield TorchInGraphFunctionVariable, "call_function", around(_no_tensor)
    yield TorchInGraphFunctionVariable, "call_function", call_before(_check_full)


def _check_dimensions(_: VariableBuilder, value: Any) -> None:
    if type(value).__name__ == "ndarray" and value.ndim == 0:
        leave_to_user(
            "it reads a numpy array without dimensions; hold float(array) or torch.from_numpy(array)"
        )


def _check_made(self: NumpyNdarrayVariable, proxy: fx.Proxy, *_: Any, **__: Any) -> None:
    """Mark the node of a number. Leave what numpy would not make to the user's own code."""
    node = proxy.node
    is_number = self.ndim == 0
    is_made = node.op != "placeholder" and _IS_NUMBER not in node.meta
    if is_made and (is_number or isinstance(node.target, _OF_NUMPY)) and not _is_as_in_numpy(node):
        leave_to_user(
            "it makes a numpy array without dimensions, or calls a function that PyTorch computes in another "
            "dtype or shape than numpy; use a Python number or a tensor"
        )
    if is_number:
        node.meta[_IS_NUMBER] = True


def _is_as_in_numpy(node: fx.Node) -> bool:
    """Call numpy with zeros. Return True if it makes what the node has: a number, or an array."""
    import numpy

    ndim = node.meta["example_value"].ndim
    try:
        args, kwargs = map_arg((node.args, node.kwargs), _zeros)
        with numpy.errstate(all="ignore"):
            result = _function_of_numpy(node.target)(*args, **kwargs)
    except Exception:  # not a function of numpy, or not for zeros
        return False
    is_kind = isinstance(result, numpy.ndarray if ndim else numpy.generic)
    return is_kind and (result.ndim, result.dtype.name) == (ndim, _dtype_name(node))


def _zeros(node: fx.Node) -> Any:
    import numpy

    sizes = [size if isinstance(size, int) else 2 for size in node.meta["example_value"].shape]
    return numpy.zeros(sizes, _dtype_name(node))[()]  # a number if there are no sizes


def _dtype_name(node: fx.Node) -> str:
    return dtype_name(node.meta["example_value"].dtype)


def _function_of_numpy(target: Any) -> Callable[..., Any]:
    """Return the function, method, operator or attribute of numpy that a node of dynamo stands for."""
    if isinstance(target, utils.numpy_to_tensor_wrapper):
        return next(own for own, traced in misc.get_np_to_tnp_map().items() if traced is target.f)
    if isinstance(target, utils.numpy_method_wrapper):
        return lambda array, *args, **kwargs: getattr(array, target.method)(*args, **kwargs)
    if isinstance(target, utils.numpy_operator_wrapper):
        return target.op
    return getattr if target is utils.numpy_attr_wrapper else target  # such as operator.getitem


def _check_dtype(
    _: SubgraphTracer, kind: str, target: Any, args: Any, kwargs: Any, *__: Any, **___: Any
) -> None:
    """Leave a call of PyTorch to the user's own code if a number of numpy may change its dtype."""
    if isinstance(target, _OF_NUMPY) or target is utils.numpy_attr_wrapper or target in _KEEP_DTYPE:
        return
    given = [each.node for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, fx.Proxy)]
    numbers = [node.meta["example_value"] for node in given if _IS_NUMBER in node.meta]
    if target is operator.setitem and not all(number.dtype in _ASSIGNED for number in numbers):
        leave_to_user("it assigns a numpy number to elements of a tensor; hold float(number) or int(number)")
    tensors = [node.meta.get("example_value") for node in given if _IS_NUMBER not in node.meta]
    if numbers and not all(any(_keeps_dtype(tensor, number) for tensor in tensors) for number in numbers):
        leave_to_user("a numpy number may change the dtype of a result; hold float(number) or int(number)")


def _keeps_dtype(tensor: Any, number: Tensor) -> bool:
    """Return True if a product with the number has the tensor's dtype, as with a Python number."""
    is_usual = number.dtype is not torch.bool and not number.is_complex()  # PyTorch makes floats of both
    return is_usual and isinstance(tensor, Tensor) and torch.result_type(tensor, number) == tensor.dtype


def _numbers_of_graphs(own: Callable[..., Any], self: Any, module_name: str, object_name: str) -> None:
    """Load a function for the outputs of a graph that returns numbers where dynamo's returns arrays."""
    if object_name == "to_numpy_helper":
        module_name, object_name = __name__, _array_or_number.__name__
    own(self, module_name, object_name)


def _array_or_number(value: Any) -> Any:
    """Return the array of a graph's tensor, or the number of a tensor without dimensions."""
    array = utils.to_numpy_helper(value)
    return array if array.shape else array[()]


def _check_class(self: BuiltinVariable, _: Any, args: Any, *__: Any) -> None:
    if self.fn in (isinstance, type) and args and isinstance(args[0].realize(), NumpyNdarrayVariable):
        _check_array(args[0].realize())


def _check_array(asked: NumpyNdarrayVariable) -> None:
    """Leave an object without dimensions to the user's own code: it may be a number or an array."""
    if asked.ndim == 0:
        leave_to_user(
            "it asks for the class or the hash of a numpy number; hold float(number) or int(number)"
        )


def _check_full(self: Any, _: Any, args: Any, kwargs: Any) -> None:
    """Leave torch.full() of a number to the user's own code: dynamo fills a float32 tensor."""
    given = *args, *kwargs.values()
    if self.value is torch.full and any(isinstance(each.realize(), NumpyNdarrayVariable) for each in given):
        leave_to_user("it fills a tensor with a numpy number; hold float(number) or int(number)")


def _no_tensor(own: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Answer torch.is_tensor() for numpy's arrays and numbers, which dynamo takes for tensors."""
    is_asked = self.value in (torch.is_tensor, torch.overrides.is_tensor_like) and len(args) == 1
    if is_asked and isinstance(args[0].realize(), NumpyNdarrayVariable):
        return ConstantVariable.create(False)
    return own(self, tx, args, kwargs)
