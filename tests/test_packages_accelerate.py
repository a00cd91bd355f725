"""accelerate: preparing, training, saving, resuming and offloading a converted model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import te_transform
from tests.packages import (
    BATCHES,
    IDS,
    MODELS,
    both,
    close,
    convert,
    converted,
    gradients,
    original,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("at_any_size")

CROSSWISE = pytest.mark.parametrize(
    ("saved", "loaded"), [("original", "converted"), ("converted", "original"), ("converted", "converted")]
)


@pytest.fixture(autouse=True)
def one_accelerator() -> Iterator[None]:
    """accelerate keeps the settings of the first Accelerator for all later ones."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(model: nn.Module, **options: Any) -> tuple[accelerate.Accelerator, nn.Module, Any]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return accelerator, model, optimizer


def test_save_model_writes_every_tensor(tmp_path: Path):
    files = []
    for name, make in MODELS.items():
        accelerate.Accelerator(cpu=True).save_model(make(), tmp_path / name)
        files.append(load_file(tmp_path / name / "model.safetensors"))
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert {*original().state_dict()} - files[1].keys() == {"head.weight"}  # which is the embedding's


@CROSSWISE
def test_load_state_resumes(saved: str, loaded: str, tmp_path: Path):
    accelerator, model, optimizer = prepared(MODELS[saved]())
    train(model, optimizer, backward=accelerator.backward)
    accelerator.save_state(tmp_path)
    expected = train(model, optimizer, backward=accelerator.backward)

    again, other, its_optimizer = prepared(MODELS[loaded]())
    again.load_state(tmp_path)
    close(train(other, its_optimizer, backward=again.backward), expected)
    close(weights(other), weights(model))


@pytest.mark.parametrize("order", ["converted, prepared", "prepared, converted"])
def test_a_training_loop(order: str):
    def act(model: nn.Module, then: Callable[[nn.Module], nn.Module] = lambda model: model) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        data = torch.utils.data.DataLoader(BATCHES * 2, batch_size=None)
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
        model, losses = then(model), []
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(*batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights(accelerator.unwrap_model(model))

    expected = act(original())
    close(act(converted()) if order == "converted, prepared" else act(original(), convert), expected)


def test_mixed_precision():
    """accelerate puts a forward of its own, under autocast, before the model's, and takes it off again."""

    def act(model: nn.Module) -> list[float]:
        accelerator, model, optimizer = prepared(model.float(), mixed_precision="bf16")
        return train(model, optimizer, backward=accelerator.backward)

    both(act, rtol=2e-2)
    accelerator, model, _ = prepared(converted().float(), mixed_precision="bf16")
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    close(model(IDS), original().float()(IDS), rtol=1e-5, atol=1e-6)


def cpu_offload(model: nn.Module, folder: Path) -> nn.Module:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def disk_offload(model: nn.Module, folder: Path) -> nn.Module:
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


def dispatch(model: nn.Module, folder: Path) -> nn.Module:
    places = {"embedding": "cpu", "head": "cpu", "blocks": "disk", "norm": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)


@pytest.mark.integration  # its hooks come off, and are seen, in the others
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload, dispatch])
@pytest.mark.parametrize("order", ["converted, offloaded", "offloaded, converted"])
def test_offloaded(order: str, offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path):
    expected = original().eval()(IDS)
    with torch.no_grad():
        if order == "converted, offloaded":
            model = offload(converted().eval(), tmp_path)
        else:
            model = offload(original().eval(), tmp_path)
            model = te_transform.convert(model, IDS, inplace=True, verify=False)
        for _ in range(2):
            close(model(IDS), expected)
        assert any(parameter.is_meta for parameter in model.parameters())
        accelerate.hooks.remove_hook_from_submodules(model)


def test_hooks_of_accelerate_come_off_again():
    """Removing the hook of add_hook_to_module() restores the converted forward, not the original one."""

    def act(model: nn.Module) -> Any:
        for module in (model, model.blocks[0].attention.q_proj, model.blocks[0].mlp):
            accelerate.hooks.add_hook_to_module(module, Doubled())
        doubled = model(IDS)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        model(*BATCHES[0]).backward()
        return doubled, gradients(model)

    both(act)


class Doubled(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output
