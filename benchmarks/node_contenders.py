"""Prepare a Hugging Face model for training: the contenders of node.py, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from node_model import blocks_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Job:
    """The model of a contender, and the mode of its training."""

    model: nn.Module
    inputs: dict[str, Tensor]  # of a step
    mesh: DeviceMesh | None  # for FSDP2
    checkpoints: bool


@dataclass(frozen=True)
class Prepared:
    """A contender's model, before it is sharded."""

    model: nn.Module
    around_forward: Callable[[], Any] = contextlib.nullcontext
    after_step: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contender:
    """A function that prepares a model, and the packages that it imports."""

    prepare: Callable[[Job], Prepared]
    packages: tuple[str, ...] = ()


def eager(job: Job) -> Prepared:
    return Prepared(job.model)


def by_block(job: Job) -> Prepared:
    for block in blocks_of(job.model):
        block.compile()
    return Prepared(job.model)


def liger(job: Job) -> Prepared:
    """Patch the model and its module, until the process of this contender ends."""
    from liger_kernel.transformers import monkey_patch

    kind = job.model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no patch for models of type {kind}")
    monkey_patch._apply_liger_kernel_to_instance(model=job.model)
    return Prepared(job.model)


def torchao(job: Job) -> Prepared:
    """Swap all linears but the head. FSDP2 gathers shards in FP8, and all scales in one collective a step."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.float8_linear import Float8Linear

    model, head = job.model, job.model.get_output_embeddings()

    def is_swapped(module: nn.Module, name: str) -> bool:
        return module is not head and not (module.in_features % 16 or module.out_features % 16)

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=job.mesh is not None)
    convert_to_float8_training(model, config=config, module_filter_fn=is_swapped)
    if not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise ValueError("torchao swaps nn.Linear, and the model has none beside its head")
    made = by_block(Job(model, job.inputs, job.mesh, job.checkpoints))
    if job.mesh is None:
        return made
    return Prepared(made.model, after_step=partial(precompute_float8_dynamic_scale_for_fsdp, model))


def hand_port(job: Job, recipe: str) -> Prepared:
    """Replace Llama's decoder layers by te.TransformerLayer."""
    import hand_port as port
    import transformer_engine.pytorch as te
    from transformers import LlamaForCausalLM

    if not isinstance(job.model, LlamaForCausalLM):
        raise ValueError(f"the hand port is for LlamaForCausalLM, got {type(job.model).__name__}")
    model = port.llama(job.model)
    if job.checkpoints:
        for block in blocks_of(model):
            block.forward = partial(te.checkpoint, block.forward, use_reentrant=False)
    return Prepared(model, around_forward=port.within(port.RECIPES[recipe]))


def ours(job: Job, **options: Any) -> Prepared:
    import te_transform

    backend = "te" if job.inputs["input_ids"].is_cuda else "torch"
    options = {"backend": backend, "verify": False, **options, "inplace": True}
    model = te_transform.convert(job.model, job.inputs, **options)
    te_transform.check_ranks(model, job.mesh)
    return Prepared(model)


def fastest(job: Job) -> Prepared:
    """Convert with fast accumulation, compiled, and the head in FP8 too."""
    import te_transform

    head = job.model.get_output_embeddings()
    sites = {name: "fp8" for name, module in job.model.named_modules() if module is head}
    return ours(job, recipe=te_transform.PrecisionPlan("fp8-delayed-fast", sites), compile=True)


CONTENDERS = {
    "te_transform fast, head in FP8, compiled": Contender(fastest),
    "te_transform fp8-delayed, compiled": Contender(partial(ours, recipe="fp8-delayed", compile=True)),
    "te_transform bf16, compiled": Contender(partial(ours, compile=True)),
    "te_transform fp8-delayed": Contender(partial(ours, recipe="fp8-delayed")),
    "te_transform bf16": Contender(ours),
    "torchao float8, compiled by block": Contender(torchao, ("torchao",)),
    "compiled by block": Contender(by_block),
    "Liger": Contender(liger, ("liger_kernel",)),
    "hand port bf16": Contender(partial(hand_port, recipe="bf16"), ("transformer_engine",)),
    "hand port fp8-delayed": Contender(partial(hand_port, recipe="fp8-delayed"), ("transformer_engine",)),
    "eager": Contender(eager),
}


def with_options(told: dict[str, Any]) -> dict[str, Contender]:
    """Return an additional contender: te_transform with these options of convert()."""
    name = "te_transform " + ", ".join(f"{key}={value}" for key, value in told.items())
    return {name: Contender(partial(ours, **told))}
