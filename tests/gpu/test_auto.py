"""compile="auto" on a GPU: all ways are timed, and the one that is chosen computes what the model did."""

import copy
from pathlib import Path

import pytest
import torch

import te_transform
from te_transform.execution import timing
from tests.gpu.zoo import error, gradients, model_of, sample


def allocated() -> int:
    """Bytes of tensors: without the 32 MiB that PyTorch keeps for cuBLAS in each stream."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("recipe", [None, "fp8-delayed"])
def test_all_ways_are_timed(recipe: str | None, timings_file: Path) -> None:
    model, inputs = model_of("llama"), sample("llama", seq=64)
    before = allocated()
    converted = te_transform.convert(model, inputs, backend="te", recipe=recipe, compile="auto")
    report = te_transform.report(converted)
    assert len(report.timings) == (5 if recipe is None else 9)
    assert all(each.seconds for each in report.timings), report.timings
    assert report.chosen == timing.fastest(report.timings).name
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert allocated() - before < 2 * held + 2**26  # nothing of the other ways


def test_the_chosen_way_is_as_exact_as_the_original(timings_file: Path) -> None:
    model, inputs = model_of("llama"), sample("llama", seq=64)
    converted = te_transform.convert(model, inputs, backend="te", compile="auto")
    exact = gradients(copy.deepcopy(model).double(), inputs)
    for _ in range(4):
        assert error(gradients(converted, inputs), exact) <= 1.1 * error(gradients(model, inputs), exact)
