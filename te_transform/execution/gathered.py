"""FSDP2's all-gathers for the backward, which are left out for blocks whose backward reads no parameter.

fully_shard() gathers the parameters of a block for its forward, and again for its backward. A compiled block
in FP8 saves its transposed FP8 weights for the backward, which reads no parameter. The second all-gather is
half of the traffic for weights. FSDPModule.set_unshard_in_backward() leaves it out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from te_transform.backends.ranks import fsdp_groups, is_sharded
from te_transform.backends.storages import holders
from te_transform.execution.call_context import ModuleCall
from te_transform.graph.context import set_to

SKIPPED = (
    "fully_shard() gathers the parameters of compiled blocks for the forward only, because their backward "
    "reads quantized weights that the forward has saved"
)


# the numbers of graphs that ran in a call of a block: "all", and those "compiled" in FP8
_ran: ContextVar[Counter[str] | None] = ContextVar("_ran", default=None)


class Pending:
    """The calls of one block whose backward may still run.

    Args:
        block: a module that FSDP2 shards.
    """

    def __init__(self, block: nn.Module):
        self.block = weakref.ref(block)
        self.readers: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.others: weakref.WeakSet[_Call] = weakref.WeakSet()

    def add(self, out: Any, reads: bool) -> None:
        """Add a call with these outputs. `reads` is True if its backward reads parameters."""
        call = _Call(self)
        (self.readers if reads else self.others).add(call)
        for node in _nodes(out):
            node.metadata.setdefault(Pending, []).append(call)  # the call lives as long as its graph
            if not reads:
                node.register_hook(call.end)
        self.update()

    def update(self) -> None:
        """Leave out the all-gather if calls wait for a backward, and no backward of them reads parameters."""
        if (block := self.block()) is not None:
            block.set_unshard_in_backward(bool(self.readers) or not self.others)


class _Call:
    """A call of a block that has a backward."""

    def __init__(self, pending: Pending):
        self.pending = pending

    def end(self, *_: Any) -> None:
        """End the call, as soon as the first node of its backward has run, or its graph was freed."""
        if self in self.pending.others:
            self.pending.others.discard(self)
            self.pending.update()

    __del__ = end


_pending: weakref.WeakKeyDictionary[nn.Module, Pending] = weakref.WeakKeyDictionary()


def run_gathered(call: ModuleCall, run: Callable[[ModuleCall], Any], tell: Callable[[str], None]) -> Any:
    """Run a call. Leave out the next all-gather of a block's parameters if the backward reads none of them.

    A backward that reads a parameter holds its memory after the forward.

    Args:
        call: of a block, with a recipe.
        run: runs the call.
        tell: receives a sentence if the all-gather is left out.
    """
    block = call.module
    if not (_may_skip(call) and _is_supported(block)):
        return run(call)
    parameters = [*block.parameters()]
    before, ran = [*map(holders, parameters)], Counter()
    with set_to(_ran, ran):
        out = run(call)
    is_compiled = ran == {"all": 1, "compiled": 1} and not call.is_checkpointed
    reads = not is_compiled or before != [*map(holders, parameters)]
    _pending.setdefault(block, Pending(block)).add(out, reads)
    if not reads:
        tell(SKIPPED)
    return out


def note_graph() -> None:
    """Count a graph of the running block."""
    if (ran := _ran.get()) is not None:
        ran["all"] += 1


def with_copied_vectors(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments for a compiled graph in FP8, and count the graph.

    In a block that FSDP2 has gathered, parameters with one dimension are copied. The backward of a norm reads
    its scale.
    """
    if (ran := _ran.get()) is None:
        return arguments
    ran["compiled"] += 1
    return [
        each.clone() if isinstance(each, nn.Parameter) and each.dim() <= 1 else each for each in arguments
    ]


def gather_again(block: nn.Module) -> None:
    """Gather the parameters of a block for each backward."""
    if _pending.pop(block, None) is not None:
        block.set_unshard_in_backward(True)


def _may_skip(call: ModuleCall) -> bool:
    """Return True if the options may lead to a backward without parameters, and the call has a backward."""
    return bool(call.options.compile) and call.records_gradients and not call.in_backward


def _is_supported(block: nn.Module) -> bool:
    """Return True if FSDP2 gathers the parameters of this block alone, from all ranks, for the backward."""
    groups = fsdp_groups(block) if is_sharded(block) else ()
    if len(groups) != 1 or len(groups[0].modules) != 1 or groups[0]._use_post_forward_mesh:
        return False
    return block in _pending or groups[0].unshard_in_backward


def _nodes(out: Any) -> list[Node]:
    """Return the last nodes of the autograd graph of these outputs."""
    leaves = tree_leaves(out)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
