"""Calls that update tensors beside their result, such as a batch norm in training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.execution.inductor_faults import decompositions
from te_transform.graph.effects import updated
from te_transform.training.layer_calls import decide_on_layers
from tests.attacks import WIDTH, Block, Pair, X
from tests.compilers import Compiler
from tests.dropped import Fixed
from tests.recordings import Recorder
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

ROWS = torch.arange(X.shape[1])
Use = Callable[["Model", Tensor], Tensor]


class Model(Block):
    """A block, and what a forward does with statistics and a codebook."""

    def __init__(self, use: Use):
        super().__init__()
        self.use, self.batch = use, nn.BatchNorm1d(WIDTH)
        self.instance = nn.InstanceNorm1d(X.shape[1], affine=True, track_running_stats=True)
        self.rows = nn.Embedding(X.shape[1], WIDTH, max_norm=1.0)
        self.register_buffer("codebook", torch.randn(8, WIDTH))
        nn.init.normal_(self.rows.weight, std=3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, super().forward(x))

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        batch = self.batch
        return batch.weight, batch.bias, batch.running_mean, batch.running_var

    def sum_of_rows(self) -> Tensor:
        """Return what the updates of an embedding change."""
        return self.rows.weight.sum()


def batch_norm(model: Model, y: Tensor) -> Tensor:
    model.batch(y.flatten(0, 1))
    return y


def equal_calls(model: Model, y: Tensor) -> Tensor:
    rows = y.flatten(0, 1)
    return model.batch(rows) + model.batch(rows)


def instance_norm(model: Model, y: Tensor) -> Tensor:
    model.instance(y)
    return y


def of_torch(model: Model, y: Tensor) -> Tensor:
    torch.batch_norm(y.flatten(0, 1), *model.statistics, True, 0.1, 1e-5, False)
    return y


def native(model: Model, y: Tensor) -> Tensor:
    torch.native_batch_norm(y.flatten(0, 1), *model.statistics, True, 0.1, 1e-5)
    return y


def aten(model: Model, y: Tensor) -> Tensor:
    torch.ops.aten.native_batch_norm(y.flatten(0, 1), *model.statistics, True, 0.1, 1e-5)
    return y


def embedding(model: Model, y: Tensor) -> Tensor:
    model.rows(ROWS)
    return y + model.sum_of_rows()


def bag(model: Model, y: Tensor) -> Tensor:
    F.embedding_bag(ROWS[:4].view(2, 2), model.rows.weight, max_norm=1.0)
    return y + model.sum_of_rows()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "use", [batch_norm, equal_calls, instance_norm, of_torch, native, aten, embedding, bag]
)
def test_calls_that_update_a_tensor_run(use: Use, compile: bool, compilations: Compiler) -> None:
    pair = Pair.of(seeded(Model, use), compile=compile)
    for _ in range(2):
        pair.agree()
        state = pair.original.state_dict()
        torch.testing.assert_close(pair.converted.state_dict(), state)
    assert te_transform.report(pair.converted).counts["layernorm_mlp"] == 1


def test_replays_update_statistics_once(cuda_graphs: Recorder) -> None:
    """A recording runs a graph several times."""
    pair = Pair.of(seeded(Model, equal_calls), graphs=True)
    for _ in range(5):
        pair.agree()
        torch.testing.assert_close(pair.converted.state_dict(), pair.original.state_dict())
    assert cuda_graphs["forward"] > 1


@pytest.mark.parametrize("compile", [False, True])
def test_a_dropped_layer_collects_no_statistics(compile: bool, compilations: Compiler) -> None:
    """The layers' batch norms read what a dropped layer does not compute."""
    model = seeded(Layers)
    converted = te_transform.convert(copy.deepcopy(model), X, verify=False, compile=compile)
    decide_on_layers(converted, runner_of(converted), Fixed({"layers.0": 1.0, "layers.1": None}))
    for _ in range(2):
        torch.testing.assert_close(converted(X), model.layers[0](X))
        torch.testing.assert_close(dict(converted.named_buffers()), dict(model.named_buffers()))
    assert model.layers[0].mean.any()
    assert not model.layers[1].mean.any()


class Measured(nn.Module):
    """A layer of a residual stream, and statistics of its branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        F.batch_norm(y.flatten(0, 1), self.mean, self.variance, training=True)
        return x + y


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Measured(), Measured()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def changed_later(model: Model, y: Tensor) -> Tensor:
    before = model.codebook[0] + 1
    model.codebook.mul_(0.9)
    return y * before


def replaced_later(model: Model, y: Tensor) -> Tensor:
    before = model.codebook[0] + 1
    model.codebook.data = model.codebook * 0.9
    return y * before


def changed_by_values(model: Model, y: Tensor) -> Tensor:
    """Read the nearest rows of a codebook, and move them, as vector quantization does."""
    rows = y.flatten(0, 1)
    nearest = torch.cdist(rows.detach(), model.codebook).argmin(-1)
    chosen = model.codebook[nearest]
    with torch.no_grad():
        model.codebook[nearest] = 0.9 * chosen + 0.1 * rows
    return rows * chosen.sum() + ((rows - chosen) ** 2).mean()


def statistics_read(model: Model, y: Tensor) -> Tensor:
    return model.batch(y.flatten(0, 1)) * model.batch.running_mean


@pytest.mark.parametrize(
    ("use", "is_compiled"),
    [(changed_later, False), (replaced_later, False), (changed_by_values, True), (statistics_read, False)],
)
def test_a_backward_reads_values_before_a_change(use: Use, is_compiled: bool, compilations: Compiler) -> None:
    """A compiled backward would read the changed ones, unless the forward saves the others."""
    pair = Pair.of(seeded(Model, use), compile=True)
    for _ in range(3):
        pair.agree()
    said = "its backward needs an argument as it was before the forward changed it"
    assert is_compiled is not any(said in note for note in te_transform.report(pair.converted).notes)


def scaled_product(model: Model, y: Tensor) -> Tensor:
    """For inductor, the sum of a product and a tensor, whose `alpha` it loses."""
    return torch.add(y, y @ model.codebook.T @ model.codebook, alpha=0.1)


def ones_summed(model: Model, y: Tensor) -> Tensor:
    """For inductor, a range in int64, which the backward reads as int32."""
    return y * torch.ones(y.shape[1], dtype=torch.int32).cumsum(0, dtype=torch.int32)[:, None]


def masked_later(model: Model, y: Tensor) -> Tensor:
    """For inductor, a write to the scores, which the first softmax reads later."""
    scores = y @ y.mT
    turned, masked = scores.mT.softmax(-1), scores.clone()
    masked[ROWS[:2, None] > ROWS - 2] = 0.5
    return turned + masked


def moved_rows(model: Model, y: Tensor) -> Tensor:
    """For inductor, a write to the scores, whose values are a view of the scores."""
    scores = y @ model.codebook.T
    return scores.index_copy(1, ROWS[1::3], scores[:, :2])


def not_a_number(model: Model, y: Tensor) -> Tensor:
    """For inductor, zero."""
    return y + (model.codebook[0] / 0 - torch.inf) * 0


def rounded_down(model: Model, y: Tensor) -> Tensor:
    """For inductor, 7 for the element 0.7."""
    return y + torch.arange(y.shape[-1]) / 10 // 0.1


def written_behind_dropout(model: Model, y: Tensor) -> Tensor:
    """For AOTAutograd, a write to a copy."""
    dropped = F.dropout(y, 0.5, training=False)
    dropped += model.codebook[0]
    F.dropout(y, p=0.0).mul_(2)
    return y * 3


def test_a_write_behind_an_idle_dropout_changes_its_argument(compilations: Compiler) -> None:
    pair = Pair.of(seeded(Model, written_behind_dropout), compile=True)
    pair.agree()
    assert compilations


@pytest.mark.integration
def test_outputs_of_inductor_share_no_memory() -> None:
    def added(model: Model, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, y + torch.zeros_like(y)

    def change_one(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            y, other = model(x)
        y.zero_()
        return other

    Pair.of(seeded(Model, added), compile=True).agree(change_one)


def test_numbers_behind_masks_are_not_written_in_place() -> None:
    x, mask, number = torch.randn(2, 3), torch.tensor([True, False]), torch.tensor([0.5])

    def put(x: Tensor, mask: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        masked = x.index_put((mask,), number), x.index_put((mask,), number[0], accumulate=True)
        return *masked, x.index_put((mask.long(),), number), x.index_put((mask,), x[:1])

    traced = make_fx(put, decomposition_table=decompositions())(x, mask, number)
    left = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    assert len(left) == 2
    torch.testing.assert_close(traced(x, mask, number), put(x, mask, number))


def test_quotients_are_rounded_down_as_in_python() -> None:
    x = torch.tensor([1.0, 0.3, 0.6, 0.7, -1.0, -0.7, 5.0, 0.0, 7.5, torch.inf, torch.nan])
    y = torch.tensor([[0.1], [-0.3], [2.0], [0.0]])

    def divide(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        floats = x // y, x // 0.1, x // 0, 0.7 // y, x.double() // y, x.bfloat16() // 0.1
        numbers = x.nan_to_num(posinf=9).mul(10).long()
        return *floats, numbers // 0.3, numbers // -3, numbers // 2, torch.div(x, y, rounding_mode="trunc")

    traced = make_fx(divide, decomposition_table=decompositions())(x, y)
    torch.testing.assert_close(traced(x, y), divide(x, y), equal_nan=True, rtol=0, atol=0)


def test_no_sum_with_keywords_is_compiled() -> None:
    x, y, ones = torch.randn(2, 3), torch.randn(2, 3), torch.ones(4, dtype=torch.int8)

    def sums(x: Tensor, y: Tensor, ones: Tensor) -> tuple[Tensor, ...]:
        added = torch.add(x, y, alpha=0.1), torch.add(x, y), torch.add(x, 2, alpha=3)
        cumulative = ones.cumsum(0), ones.cumsum(0, dtype=torch.int8), ones.cumsum(0, dtype=torch.float64)
        return *added, *cumulative

    traced = make_fx(sums, decomposition_table=decompositions())(x, y, ones)
    targets = torch.ops.aten.add.Tensor, torch.ops.aten.cumsum.default
    found = [node for node in traced.graph.nodes if node.target in targets]
    assert len(found) == 6
    assert not any(node.kwargs for node in found)
    torch.testing.assert_close(traced(x, y, ones), sums(x, y, ones), rtol=1e-6, atol=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize(
    "use",
    [changed_later, changed_by_values, scaled_product, ones_summed, masked_later, moved_rows,
     not_a_number, rounded_down, written_behind_dropout],
)  # fmt: skip
def test_inductor_computes_the_same(use: Use) -> None:
    pair = Pair.of(seeded(Model, use), compile=True)
    for _ in range(2):
        pair.agree()


def test_a_change_that_no_backward_reads_is_compiled(compilations: Compiler) -> None:
    pair = Pair.of(seeded(Model, equal_calls), compile=True)
    pair.agree()
    assert compilations
    assert not [note for note in te_transform.report(pair.converted).notes if "uncompiled" in note]


@pytest.mark.parametrize(
    ("function", "arguments", "indices"),
    [
        (F.batch_norm, (0, 1, 2, 3, 4, True), [1, 2]),
        (F.batch_norm, (0, 1, 2, 3, 4, False), []),
        (F.batch_norm, (0, 1, 2), []),
        (F.instance_norm, (0, 1, 2), [1, 2]),
        (F.instance_norm, (0,), []),
        (torch.batch_norm, (0, 1, 2, 3, 4, True, 0.1, 1e-5, False), [3, 4]),
        (torch.ops.aten.native_batch_norm.default, (0, 1, 2, 3, 4, True, 0.1, 1e-5), [3, 4]),
        (F.embedding, (0, 1), []),
        (F.embedding, (0, 1, None, 1.0), [1]),
        (torch.embedding, (0, 1), []),
    ],
)
def test_updated_arguments(function: Callable, arguments: tuple, indices: list[int]) -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{index}") for index in range(5)]
    given = [nodes[each] if type(each) is int else each for each in arguments]
    assert updated(graph.call_function(function, tuple(given))) == [nodes[index] for index in indices]
