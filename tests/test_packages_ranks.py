"""accelerate's DDP and FSDP2, and transformers' Trainer as torchrun starts it, in two processes."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import te_transform
from tests.packages import BATCHES, LLAMA_IDS, close, convert, converted_llama, llama, original
from tests.ranks import install_stand_in, spawn

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("distributed"),
    pytest.mark.usefixtures("at_any_size"),
]


def with_ddp() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True)


def with_fsdp(from_meta: bool = False) -> accelerate.Accelerator:
    """accelerate shards on GPUs alone: here it is told that the CPUs are some."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=from_meta,
    )
    return accelerator


def with_fsdp_from_meta() -> accelerate.Accelerator:
    """The converted model goes to meta, and what rank 0 had is handed out in shards."""
    return with_fsdp(from_meta=True)


KINDS: dict[Callable[[], accelerate.Accelerator], type] = {
    with_ddp: DistributedDataParallel,
    with_fsdp: FSDPModule,
    with_fsdp_from_meta: FSDPModule,
}


def accelerated(start: Callable[[], accelerate.Accelerator]) -> list[Any]:
    """The losses and weights of the original and of the converted model."""
    found = []
    for make in (original, lambda blocks: convert(original(blocks))):
        accelerate.state.AcceleratorState._reset_state()
        accelerator, model = start(), make(2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        assert isinstance(model, KINDS[start])
        losses = []
        for step in range(4):
            with accelerator.accumulate(model):
                loss = model(*BATCHES[(step + dist.get_rank()) % len(BATCHES)])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        whole = {
            name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
            for name, p in model.named_parameters()
        }
        found.append((losses, whole))
    return found


@pytest.mark.parametrize("start", KINDS)
def test_accelerate_trains_as_the_original(start: Callable[[], accelerate.Accelerator], tmp_path: Path):
    one, other = spawn(accelerated, 2, tmp_path, start)
    for (losses, weights), (actual, actual_weights) in (one, other):
        close(actual, losses)
        close(actual_weights, weights)
    assert one[1][0][0] != other[1][0][0]


def trained(folder: str) -> list[list[float]]:
    """The losses that Trainer logs, of the original and of the converted model."""
    found = []
    for make in (llama, converted_llama):
        accelerate.state.AcceleratorState._reset_state()
        model = make(2)
        settings = transformers.TrainingArguments(
            folder,
            max_steps=4,
            logging_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            adam_epsilon=1e-4,  # no gradient that is all rounding gets a step of full length
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        rows = [{"input_ids": ids, "labels": ids} for ids in LLAMA_IDS]
        trainer = transformers.Trainer(model, settings, train_dataset=rows)
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert settings.world_size == 2
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_trainer_in_two_processes_trains_as_the_original(tmp_path: Path):
    for losses, actual in spawn(trained, 2, tmp_path, str(tmp_path / "runs")):
        assert len(losses) == 4
        close(actual, losses, rtol=1e-3, atol=1e-5)


def what_is_said(cases: tuple[str, ...]) -> dict[str, str]:
    """Return the error of check_ranks() for each difference of rank 1."""
    install_stand_in()
    found = {}
    for case in cases:
        other = case if dist.get_rank() == 1 else ""
        model = llama(1 if other == "model" else 2)
        skip = ("model.layers.0",) if other == "plan" else ()
        recipe = "fp8-current" if other == "recipe" else "fp8-delayed"
        ids = {"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2]}
        asked = {"recipe": recipe, "skip": skip, "approximate": other == "options"}
        fused = te_transform.convert(model, ids, backend="te", inplace=True, verify=False, **asked)
        dimension = "replicas" if other == "mesh" else "shards"
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
        with pytest.MonkeyPatch.context() as patch:
            if other == "version":
                home = import_module("te_transform.check_ranks")  # the package's name is the function
                patch.setattr(home, "installed_version", lambda package: "0.0.1")
            try:
                te_transform.check_ranks(fused, mesh)
                found[case] = ""
            except te_transform.RanksError as error:
                found[case] = str(error)
    return found


SAID = {
    "model": r"rank 1 has the model LlamaForCausalLM of 12 parameters \(\w+\), rank 0 has .* of 21 ",
    "plan": r"rank 1 has the plan \d+ fused sites \(\w+\), rank 0 has \d+ fused sites",
    "recipe": r"rank 1 has the recipe fp8-current \(\w+\), rank 0 has fp8-delayed \(",
    "options": r"^rank 1 has the options backend=te .*approximate=True .*, rank 0 has .*approximate=False ",
    "mesh": r"^rank 1 has the mesh \[0, 1\] \('replicas',\), rank 0 has \[0, 1\] \('shards',\): convert ",
    "version": r"rank 1 has the version of te_transform 0.0.1, rank 0 has \d",
    "nothing": r"^$",
}


def test_ranks_that_disagree_are_told(tmp_path: Path):
    """The same in all of them, the one that differs and those that do not."""
    one, other = spawn(what_is_said, 2, tmp_path, (*SAID,))
    assert one == other
    for case, said in SAID.items():
        assert re.search(said, one[case]), (case, one[case])
