"""Where checkpoints or FSDP cut a forward, blocks are captured one by one, and so is what is around them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.execution.policy import CHECKPOINTED_BY_HOOKS
from tests import compilers
from tests.attacks import WIDTH, Attends, Block, Pair, X
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

LABELS = torch.arange(X.shape[1]).expand(X.shape[:2])
WORDS = 24
MOST_CALLS = 35  # of Python, for each call of a block


class Backbone(nn.Module):
    """Blocks, each under a checkpoint in training."""

    checkpoints = True

    def __init__(self, layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            recomputes = self.training and self.checkpoints
            x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        return {"last": x}


class Model(nn.Module):
    """A head behind a backbone, with a loss."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.backbone = Backbone(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.backbone(x)["last"]
        logits = self.head(self.norm(hidden))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()), "logits": logits}


class Unchecked(Model):
    """Without checkpoints."""

    def __init__(self, layers: int = 2):
        super().__init__(layers)
        self.backbone.checkpoints = False


class Nested(Model):
    """Functions that call functions: each is cut where the blocks are called."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.backbone(x)["last"]

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).square().mean()


class CallsLayers(Nested):
    """Calls the layers that its backbone holds by itself."""

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.backbone.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return x


class RepeatsItsHead(Nested):
    """Its head is under a checkpoint too."""

    def logits(self, x: Tensor) -> Tensor:
        return checkpoint(lambda hidden: self.head(self.norm(hidden)), self.hidden(x), use_reentrant=False)


class TwoTowers(Nested):
    """Two parts, and something between them."""

    def __init__(self):
        super().__init__()
        self.second, self.between = Backbone(), nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        first = super().hidden(x)
        return self.second(F.gelu(self.between(first)))["last"]


def paths(model: nn.Module) -> list[str]:
    """Return the paths of the sites of all current graphs."""
    return [site.path for graph in runner_of(model).graphs for site in graph.plan.sites]


class RepeatsItsMLP(Block):
    """Its MLP is under a checkpoint in training."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + (checkpoint(self.mlp, hidden, use_reentrant=False) if self.training else self.mlp(hidden))


class InsideBlocks(Unchecked):
    """Checkpoints inside of its blocks."""

    def __init__(self):
        super().__init__()
        self.backbone.layers = nn.ModuleList(RepeatsItsMLP() for _ in range(2))


@contextmanager
def nothing_traced() -> Iterator[None]:
    before = counters["frames"]["total"]
    yield
    assert counters["frames"]["total"] == before


def trained(model: nn.Module, x: Tensor) -> Any:
    out = model(x.requires_grad_())
    loss = out["loss"] if isinstance(out, dict) else out
    loss.backward()
    return out


def test_the_head_is_in_the_report_and_in_inspect() -> None:
    pair = Pair.of(Model)
    report = te_transform.report(pair.converted)
    assert report.counts == {"layernorm_mlp": 2, "layernorm_linear": 1}
    assert te_transform.inspect(pair.original, X).counts == report.counts
    assert not any("cannot capture" in sentence for sentence in report.breaks)
    pair.agree(trained)
    assert te_transform.verify(pair.original, pair.converted, X)


def test_is_captured_once_in_each_mode() -> None:
    pair = Pair.of(Model)
    for _ in range(3):
        pair.agree(trained)
    with nothing_traced():
        pair.agree(trained)
    with torch.no_grad():
        pair.agree(lambda model, x: model.eval()(x))
    assert paths(pair.converted).count("head") == 2


@pytest.mark.parametrize("kind", [Nested, TwoTowers, CallsLayers, RepeatsItsHead])
def test_other_ways_to_call_blocks(kind: type[nn.Module]) -> None:
    pair = Pair.of(kind)
    for _ in range(3):
        pair.agree(trained)
    with nothing_traced():
        pair.agree(trained)
    assert "mlp" in paths(pair.converted)
    assert ("between" in paths(pair.converted)) is (kind is TwoTowers)


def test_modules_read_before_a_graph_break_keep_their_paths() -> None:
    """The head in self.head(self.hidden(x)) is read before the call that ends the graph."""
    report = te_transform.report(Pair.of(Nested).converted)
    assert sorted(site.path for site in report.sites) == [
        "backbone.layers.0.mlp",
        "backbone.layers.1.mlp",
        "head",
    ]


def test_changes_around_the_blocks_are_seen() -> None:
    pair = Pair.of(Model)
    pair.attack(lambda model: setattr(model.norm, "eps", 2.0), trained)
    pair.attack(lambda model: model.head.register_forward_hook(lambda *args: args[-1] * 2), trained)
    pair.attack(
        lambda model: model.backbone.register_forward_hook(lambda *args: {"last": -args[-1]["last"]}), trained
    )
    pair.attack(
        lambda model: setattr(model, "head", copy.deepcopy(model.head).requires_grad_(False)), trained
    )


def test_a_loss_in_chunks() -> None:
    pair = Pair.of(Model, chunked_loss=True)
    losses = [trained(model, X.clone())["loss"] for model in pair.models]
    torch.testing.assert_close(losses[1], losses[0])
    own, fused = ([parameter.grad for parameter in model.parameters()] for model in pair.models)
    torch.testing.assert_close(fused, own)
    assert te_transform.report(pair.converted).counts["chunked_loss"] == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_it_too(copied: Any) -> None:
    pair = Pair.of(Model)
    pair.converted = copied(pair.converted)
    for _ in range(2):
        pair.agree(trained)
    assert "head" in paths(pair.converted)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("head", [False, True], ids=["the root has the head", "the head by itself"])
def test_fsdp_gives_the_same_losses_and_gradients(head: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    pair = Pair.of(Unchecked)
    model = pair.converted
    for module in (*model.backbone.layers, *([model.head] if head else []), model):
        fully_shard(module, mesh=mesh)
    for _ in range(3):
        losses = [trained(each, X.clone())["loss"] for each in pair.models]
        torch.testing.assert_close(losses[1], losses[0])
        for own, sharded in zip(pair.original.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), own.grad)
            own.grad = sharded.grad = None
    assert "mlp" in paths(model)
    assert paths(model).count("head") == (1 if head else 2)  # one is of the conversion, as a whole


@pytest.mark.usefixtures("process_group")
def test_fsdp_of_blocks_that_were_cut_in_the_conversion() -> None:
    """FSDP2 derives its classes from those of the captured blocks."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    pair = Pair.of(InsideBlocks)
    for module in (*pair.converted.backbone.layers, pair.converted):
        fully_shard(module, mesh=mesh)
    for mode in (True, False, True):
        losses = [trained(each.train(mode), X.clone())["loss"] for each in pair.models]
        torch.testing.assert_close(losses[1], losses[0])
    assert "mlp" in paths(pair.converted)  # of the evaluation


def test_a_compiled_block_takes_few_calls_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is the bottleneck of small models, whose blocks are captured one by one under FSDP2."""
    compilers.install(patch=monkeypatch)
    counts = [_python_calls(Pair.of(Unchecked(layers), compile=True)) for layers in (3, 4)]
    assert counts[1] - counts[0] <= MOST_CALLS


def _python_calls(pair: Pair) -> int:
    """Return the number of calls of this library's functions in a forward, without those in guards."""
    runner_of(pair.converted).capture_blocks(pair.converted)
    x = X.clone()
    for _ in range(3):
        trained(pair.converted, x)
    count, home = 0, str(Path(te_transform.__file__).parent)

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and name.startswith(home) and "/graph/" not in name

    sys.setprofile(see)
    pair.converted(x)
    sys.setprofile(None)
    return count


@pytest.mark.parametrize("part", ["mlp", ""], ids=["inside of blocks", "around blocks"])
def test_checkpoints_that_hooks_begin_run_the_original(part: str) -> None:
    """A graph saves other tensors than the modules that such a checkpoint repeats."""
    pair = Pair.of(Unchecked)
    for model in pair.models:
        for layer in model.backbone.layers:
            checkpoint_by_hooks(layer.get_submodule(part))
    for mode in (True, False, True):
        for model in pair.models:
            model.train(mode)
        pair.agree(trained)
    assert CHECKPOINTED_BY_HOOKS in te_transform.report(pair.converted).notes


class Clamps(Attends):
    """A block that looks at its values, as DETR's: dynamo leaves the checkpoint around it alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if torch.isfinite(x).all() else x.clamp(-1.0, 1.0)


class ClampsFirst(TwoTowers):
    """The blocks of the first tower have run when a graph of the second shows that there are checkpoints."""

    def __init__(self):
        super().__init__()
        self.backbone.layers = nn.ModuleList(Clamps() for _ in range(2))


def test_checkpoints_repeat_the_blocks_that_ran_before_they_were_captured() -> None:
    model = seeded(ClampsFirst)
    model.backbone.checkpoints = model.second.checkpoints = False
    pair = Pair.of(model)
    for each in pair.models:
        each.train()
        each.backbone.checkpoints = each.second.checkpoints = True
    for _ in range(2):
        assert "error" not in pair.agree()
