"""Errors of parallelize() for models and meshes that do not fit, raised before anything changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_transform
from te_transform import ParallelError
from te_transform.backends import cublas
from te_transform.backends.limits import alike_on_ranks
from te_transform.parallel.divided import Parallel
from tests.models.quickstart import QuickstartModel

pytestmark = pytest.mark.xdist_group("distributed")

HEADS = 6


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks, of which this is the first and the others answer nothing."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def original(ffn: int = 48) -> nn.Module:
    torch.manual_seed(0)
    return QuickstartModel(24, ffn, HEADS, 2).eval()


def sample() -> Tensor:
    return torch.randn(8, 2, 24)


def converted(**options: Any) -> nn.Module:
    return te_transform.convert(original(options.pop("ffn", 48)), sample(), verify=False, **options)


def unchanged(model: nn.Module, given: nn.Module, *args: Any, match: str, **options: Any) -> None:
    """parallelize() raises, and `model`, which may lie in what it is given, is bitwise what it was."""
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(ParallelError, match=re.escape(match)):
        te_transform.parallelize(given, *args, **options)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        if not isinstance(parameter, DTensor):
            assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_heads_that_the_mesh_does_not_divide(ranks: int) -> None:
    model = converted()
    said = "layers.0.qkv_projection: attention has 6 heads, which 4 ranks do not divide"
    unchanged(model, model, mesh(4), sample(), match=said)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_width_that_the_mesh_does_not_divide(ranks: int) -> None:
    model = converted(ffn=49)
    said = "layers.0.mlp.linear1: a linear makes 49 columns, which 2 ranks do not divide"
    unchanged(model, model, mesh(2), sample(), match=said)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_skipping_all_modules_raises(ranks: int) -> None:
    model = converted()
    said = "nothing of QuickstartModel can be divided among ranks"
    unchanged(model, model, mesh(2), sample(), match=said, skip="*")


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "layer.0"}, "in skip, got 'layer.0', which names no module of QuickstartModel"),
        ({"skip": 3}, "expected module paths or globs such as 'model.layers.0*' for skip, got 3"),
        ({"skip": [3]}, "expected module paths or globs such as 'model.layers.0*' in skip, got 3"),
        ({"sequence_parallel": "yes"}, "expected True or False for sequence_parallel, got 'yes'"),
    ],
    ids=str,
)
def test_options_are_checked_first(ranks: int, options: dict[str, Any], said: str) -> None:
    model = converted()
    with pytest.raises(te_transform.OptionError, match=re.escape(said)):
        te_transform.parallelize(model, mesh(2), sample(), **options)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "not a model": (lambda: 3, "expected a converted model, got a int; pass the model that te_transform."),
    "not converted": (original, "expected a converted model, got QuickstartModel, which is not converted"),
    "wrapped": (
        lambda: nn.parallel.DistributedDataParallel(converted()),
        "expected the converted model itself, got it wrapped by DistributedDataParallel",
    ),
    "CUDA graphs": (
        lambda: converted(compile="reduce-overhead"),
        "expected a model whose ranks record CUDA graphs together",
    ),
}


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(ranks: int, name: str) -> None:
    make, said = OTHERS[name]
    given = make()
    unchanged(given if isinstance(given, nn.Module) else nn.Module(), given, mesh(2), sample(), match=said)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_parameters_that_are_not_plain(ranks: int) -> None:
    model = converted()
    norm = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh(2), [Shard(0)]))
    unchanged(model, model, mesh(2), sample(), match="expected plain tensors as parameters, got a DTensor")


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_gradients_and_hooks_that_would_be_lost(ranks: int) -> None:
    model = converted()
    model(sample()).sum().backward()
    unchanged(model, model, mesh(2), sample(), match="expected parameters without gradients")


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_meshes(ranks: int) -> None:
    model = converted()
    unchanged(model, model, 4, sample(), match="expected a DeviceMesh, got a int")
    unchanged(model, model, mesh(2, 2), sample(), match="expected a mesh of one dimension, got 2 dimensions")


def test_a_process_group_that_is_missing() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model, left = converted(), mesh(2)
    dist.destroy_process_group()
    unchanged(model, model, left, sample(), match="expected a process group, got none")


def test_a_model_that_is_divided(process_group: None) -> None:
    model, x = converted(), sample()
    expected = model(x)
    te_transform.parallelize(model, mesh(1), x)
    assert torch.allclose(model(x), expected, atol=1e-5)
    unchanged(model, model, mesh(1), x, match="expected a whole model, got QuickstartModel, which 1")
    with pytest.raises(
        te_transform.ModelError, match=r"expected a whole model, got .* divided among ranks; call tr"
    ):
        te_transform.trace(model, x)
    said = "expected two whole models, got a second model divided among ranks"
    with pytest.raises(ValueError, match=said):
        te_transform.verify(original(), model, x)
    with pytest.raises(ParallelError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(te_transform.AccumulationError, match="expected plain tensors as gradients"):
        te_transform.accumulate(model, steps=2).__enter__()
    with pytest.raises(te_transform.QuantizationError, match="expected plain tensors as weights"):
        te_transform.quantize_weights(model)
    report = str(te_transform.report(model))
    assert "divided among 1 ranks is attention" in report
    whole = te_transform.revert(model)
    assert not any(isinstance(p, DTensor) for p in whole.parameters())
    assert torch.allclose(whole(x), expected, atol=1e-5)


def test_an_optimizer_made_before_raises_in_its_step(process_group: None) -> None:
    model, x = converted(), sample()
    early = torch.optim.AdamW(model.parameters())
    te_transform.parallelize(model, mesh(1), x)
    late, before = torch.optim.AdamW(model.parameters()), [p.to_local().clone() for p in model.parameters()]
    model(x).sum().backward()
    with pytest.raises(ParallelError, match="make the optimizer after parallelize"):
        early.step()
    late.step()
    after = [p.to_local() for p in model.parameters()]
    assert not any(map(torch.equal, before, after))


def test_ranks_of_a_divided_model_choose_no_product_by_its_time(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other models of the process do not either, for as long as a backward may come: after revert(), too."""
    timed: list[Any] = []
    monkeypatch.setattr(alike_on_ranks, "entered", 0)  # of earlier tests
    monkeypatch.setattr(cublas, "_known_product", timed.append)
    monkeypatch.setattr(cublas, "by_pytorch", lambda a, *others: a)

    def is_timed() -> bool:
        timed.clear()
        a = torch.ones(2, 2)
        assert cublas.fastest_product(a, a, a, a, None, a.dtype, True) is a
        return bool(timed)

    x = torch.randn(2, 4)
    model = te_transform.convert(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), x, verify=False)
    expected = model(x)
    with monkeypatch.context() as patch:
        patch.setattr(Parallel, "distributed", lambda *given: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            te_transform.parallelize(model, mesh(1), x)
    assert is_timed()
    te_transform.parallelize(model, mesh(1), x)
    assert not is_timed()
    te_transform.revert(model)
    assert not is_timed()
    assert torch.allclose(model(x), expected, atol=1e-5)
