"""The capture policy: one forward or many, and the calls that run the user's own code.

A capture begins whole. It is cut into blocks if a graph of the whole model would be wrong or slow:

    WHOLE -> BLOCKS, BLOCKS_AND_HEAD    FSDP shards a block, or an activation checkpoint is in a graph
    BLOCKS_AND_HEAD -> BLOCKS           an activation checkpoint is in a graph around the blocks

BLOCKS_AND_HEAD is for models whose parts call the blocks. Head and loss are captured as a graph of their own.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import fx, nn

from te_transform.canonicalize import functions
from te_transform.execution.blocks import are_held_by_parts, blocks
from te_transform.execution.call_context import Mode, ModuleCall
from te_transform.graph.nodes import called, replaced_function

CHECKPOINTED = (
    "activation checkpoints are on in the forward and the model has no list of blocks: with checkpoints, it "
    "runs the user's own code"
)

CHECKPOINTED_INSIDE = (
    "activation checkpoints are on inside blocks, which are captured one by one: with checkpoints, these "
    "blocks run the user's own code"
)

CHECKPOINTED_BY_HOOKS = (
    "hooks of modules inside the forward begin an activation checkpoint, which would repeat these modules "
    "without their graphs: with such checkpoints, the forward runs the user's own code; wrap whole blocks by "
    "checkpoint_wrapper() instead"
)

NESTED_MODEL = (
    "nn.TransformerEncoder skips padded tokens and returns zeros for them, but not if it is traced: "
    "evaluation runs the user's own code"
)


_WRITES = (
    "an autograd.Function in the forward writes in place to its argument, and dynamo captures gradients that "
    "ignore the write: the forward runs as the user's own code"
)

_REPLACED = (
    "other code has replaced PyTorch's {} by another function, which PyTorch itself would call during a "
    "trace: forwards that call it run as the user's own code"
)


class Cut(Enum):
    """The units that dynamo captures as one forward."""

    WHOLE = auto()
    BLOCKS = auto()
    BLOCKS_AND_HEAD = auto()


class CapturePolicy:
    """The policy of one converted model.

    Attributes:
        cut: the units that are captured as one forward.
        skip_this_call: classes whose forward runs the user's own code in the rest of this call.
        skip_this_mode: classes of `skip_this_call` that run the user's own code in all calls of this mode.
        checkpointed_modes: the modes in which the forward of a class contains checkpoints.
        makes_nested: True if evaluation makes nested tensors when it is not traced.
        uncaptured: classes of a divided model whose code dynamo could not capture.
        run_original: True while all calls run the user's own code.
    """

    def __init__(self, cut: Cut = Cut.WHOLE):
        self.cut = cut
        self.skip_this_call: set[type] = set()
        self.skip_this_mode: set[type] = set()
        self.checkpointed_modes: set[Mode] = set()
        self.makes_nested = False
        self.uncaptured: set[type] = set()
        self.run_original = False

    @property
    def by_block(self) -> bool:
        """True if blocks are captured one by one."""
        return self.cut is not Cut.WHOLE

    def cut_into_blocks(self, model: nn.Module) -> None:
        """Capture the blocks of `model` one by one from now on."""
        self.cut = Cut.BLOCKS_AND_HEAD if are_held_by_parts(model) else Cut.BLOCKS

    def after_checkpoint(self, kind: type, model: nn.Module | None) -> str:
        """Note an activation checkpoint in a graph of the forward of `kind`.

        As an operation of a graph, a checkpoint would draw other random numbers when it is repeated. The
        user's own code runs instead, and the blocks inside of it are captured.

        Returns:
            Why no graph runs, as a sentence for the report; or "" if the blocks are captured.
        """
        self.skip_this_call.add(kind)
        layers = [] if model is None else blocks(model)
        is_block = any(type(block) is kind for block in layers)
        if is_block or not layers:
            self.skip_this_mode.add(kind)
            return CHECKPOINTED_INSIDE if is_block else CHECKPOINTED
        if self.cut is Cut.BLOCKS_AND_HEAD:  # the checkpoint is around the head
            self.cut = Cut.BLOCKS
        return ""

    def after_hooks(self, kind: type) -> str:
        """Note a checkpoint that hooks began in the forward of `kind`. Return why no graph runs."""
        self.skip_this_call.add(kind)
        self.skip_this_mode.add(kind)
        return CHECKPOINTED_BY_HOOKS

    def after_nested(self, kind: type) -> str:
        """Note layers of nn.TransformerEncoder in a graph of `kind`. Return why no graph runs."""
        self.skip_this_call.add(kind)
        self.makes_nested = True
        return NESTED_MODEL

    def end_call(self, call: ModuleCall) -> None:
        """Note that a call has returned."""
        if type(call.module) in self.skip_this_mode:
            self.checkpointed_modes.add(call.mode)

    def __reduce__(self) -> tuple:
        """Copy or pickle the cut alone; the other attributes come from calls of the copied model."""
        return CapturePolicy, (self.cut,)


def has_checkpoints(captured: fx.GraphModule) -> bool:
    """Return True if a graph contains an activation checkpoint, which is a subgraph."""
    return any("checkpoint" in called(node) for node in captured.graph.nodes if node.op == "call_function")


def has_layers_evaluated_whole(captured: fx.GraphModule) -> bool:
    """Return True if a graph calls PyTorch's fused kernel for layers of nn.TransformerEncoder."""
    return any(node.target is torch._transformer_encoder_layer_fwd for node in captured.graph.nodes)


def makes_nested_tensors(module: nn.Module) -> bool:
    """Return True if the module is an nn.TransformerEncoder that makes nested tensors of padded inputs."""
    return isinstance(module, nn.TransformerEncoder) and bool(getattr(module, "use_nested_tensor", False))


def why_uncaptured(captured: fx.GraphModule) -> str | None:
    """Return why a graph would compute something different from the forward, or None."""
    if functions.write_to_what_they_are_given(captured):
        return _WRITES
    name = replaced_function(captured.graph)
    return None if name is None else _REPLACED.format(name)
