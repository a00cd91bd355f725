"""A converted model saves the same files as its original, and each loads the other's files."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.packages import BATCHES, MODELS, close, converted, original, train, weights

# no group of processes is needed here
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("at_any_size"),
]

Save = Callable[[nn.Module, Path], Any]


def _file(folder: Path) -> str:
    return f"{folder}/model.safetensors"


def _save_state(model: nn.Module, folder: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


def _load_state(model: nn.Module, folder: Path) -> None:
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)  # in place


FORMATS: dict[str, tuple[Save, Save]] = {
    "safetensors": (
        lambda model, folder: safetensors.torch.save_model(model, _file(folder)),
        lambda model, folder: safetensors.torch.load_model(model, _file(folder)),
    ),
    "huggingface_hub": (huggingface_hub.save_torch_model, huggingface_hub.load_torch_model),
    "huggingface_hub in shards": (
        lambda model, folder: huggingface_hub.save_torch_model(model, folder, max_shard_size="20KB"),
        huggingface_hub.load_torch_model,
    ),
    "torch": (
        lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
        lambda model, folder: model.load_state_dict(torch.load(folder / "model.pt")),
    ),
    "torch, assigned": (
        lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
        lambda model, folder: model.load_state_dict(torch.load(folder / "model.pt", mmap=True), assign=True),
    ),
    "torch, parameters": (
        lambda model, folder: torch.save(dict(model.named_parameters()), folder / "model.pt"),
        lambda model, folder: model.load_state_dict(torch.load(folder / "model.pt"), strict=False),
    ),
    "torch.distributed.checkpoint": (_save_state, _load_state),
}


def emptied(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with all its weights lost."""
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize(
    ("save", "load"),
    [
        pytest.param(*each, id=name, marks=pytest.mark.integration if "huggingface_hub" in name else ())
        for name, each in FORMATS.items()
    ],
)
def test_files_are_the_originals(save: Save, load: Save, tmp_path: Path):
    for name, make in MODELS.items():
        (tmp_path / name).mkdir()
        save(make(), tmp_path / name)
    for name in MODELS:
        for make in MODELS.values():
            model = emptied(make)
            load(model, tmp_path / name)
            same_bits(model, original())
            close(model(*BATCHES[0]), original()(*BATCHES[0]))
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in MODELS]
    assert files[0] == files[1]


def same_bits(one: nn.Module, other: nn.Module) -> None:
    actual, expected = one.state_dict(), other.state_dict()
    assert [*actual] == [*expected]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_one_modules_file_holds_that_module():
    """Not the memory of its neighbors."""

    def size(tensors: dict[str, torch.Tensor]) -> int:
        torch.save(tensors, buffer := io.BytesIO())
        return buffer.tell()

    for path in ("blocks.0.attention.q_proj", "blocks.0.mlp.up_proj"):
        sizes = [size(make().get_submodule(path).state_dict()) for make in MODELS.values()]
        assert sizes[0] == sizes[1]


def test_the_whole_model_in_a_file():
    model = converted()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again).__name__ == "Gated"
    same_bits(again, model)
    assert again.head.weight is again.embedding.weight
    for each in (again, copy.deepcopy(again)):
        close(each(*BATCHES[0]), model(*BATCHES[0]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (again, model)]
    close(train(again, optimizers[0]), train(model, optimizers[1]))
    close(weights(again), weights(model))


@pytest.mark.parametrize(("saved", "loaded"), [("original", "converted"), ("converted", "original")])
def test_a_distributed_checkpoint_of_model_and_optimizer(saved: str, loaded: str, tmp_path: Path):
    first = MODELS[saved]()
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-3)
    train(first, optimizer)
    dcp.save(_states(first, optimizer), checkpoint_id=tmp_path, no_dist=True)
    second = emptied(MODELS[loaded])
    other = torch.optim.AdamW(second.parameters(), lr=0.5)
    states = _states(second, other)
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(second, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    same_bits(second, first)
    close(train(second, other), train(first, optimizer))
    close(weights(second), weights(first))


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optimizer_state}
