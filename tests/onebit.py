"""The work of several ranks with 1-bit optimizers, and the algorithms written out plainly to compare with."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from te_transform.training import OneBitAdam, OneBitError, OneBitLamb, ZeroOneAdam
from te_transform.training.one_bit.compressed import CompressedMean
from te_transform.training.one_bit.layout import FlatLayout

FEATURES = 13  # an odd number: no size is a multiple of 8 times the ranks


class Net(nn.Module):
    """Matrices, vectors, rows of an embedding that are never read, and a branch that only some calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, FEATURES)
        self.inner, self.norm = nn.Linear(FEATURES, 31), nn.LayerNorm(31)
        self.side, self.out = nn.Linear(31, 31), nn.Linear(31, FEATURES, bias=False)

    def forward(self, x: Tensor, takes_side: bool = True) -> Tensor:
        """[rows, FEATURES] -> a loss."""
        y = self.norm(torch.tanh(self.inner(x + self.table(torch.arange(len(x)) % 5))))
        y = y + self.side(y) if takes_side else y
        return (self.out(y) - x.sin()).square().mean()


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(8, FEATURES, generator=generator).to(dtype)


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> nn.Module:
    """Return the model in DDP, which is registered if the optimizer is one of ours."""
    ddp = DistributedDataParallel(model, **options)
    if isinstance(optimizer, OneBitAdam):
        optimizer.register(ddp)
    return ddp


def train(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32
) -> None:
    for step in steps:
        ddp(batch(step, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def are_equal(value: Tensor) -> bool:
    """Return True if the ranks hold bitwise the same."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return all(torch.equal(value, other) for other in found)


# The exchange


def exchanges() -> dict[str, Any]:
    """Exchange at odd sizes for 20 steps: inputs, results and errors of this rank."""
    parameters = [
        nn.Parameter(torch.zeros(7, 43)),
        nn.Parameter(torch.zeros(5)),
        nn.Parameter(torch.zeros(3, 1)),
    ]
    layout = FlatLayout([parameters], dist.get_world_size())
    mean, generator = CompressedMean(layout, dist.group.WORLD), torch.Generator().manual_seed(dist.get_rank())
    inputs, results, is_exact = [], [], True
    for _ in range(20):
        given, values = [torch.randn(p.shape, generator=generator) for p in parameters], layout.buffer()
        for parameter, value in zip(parameters, given, strict=True):
            layout.view(values, parameter).copy_(value)
        x = mean.worker_error + values[: layout.padded]
        mean(values)
        scale = torch.linalg.vector_norm(x) / layout.matrices**0.5
        error = x - scale * torch.where(x >= 0, 1.0, -1.0)
        error[layout.matrices :] = 0.0
        is_exact &= torch.equal(mean.worker_error, error)
        inputs.append([value.double() for value in given])
        results.append([layout.view(values, p).clone() for p in parameters])
    worker, server = mean.errors(is_gathered=True)
    return {
        "is_exact": is_exact,
        "are_equal": are_equal(torch.cat([v.flatten() for step in results for v in step])),
        "inputs": inputs,
        "results": results,
        "errors": [(layout.view(worker, p) + layout.view(server, p)).double() for p in parameters[::2]],
        "padding": [worker[layout.matrices :], server[layout.matrices :]],
        "empty": [vectors_alone(), matrices_alone()],
    }


def vectors_alone() -> bool:
    parameter = nn.Parameter(torch.zeros(3))
    layout = FlatLayout([[parameter]], dist.get_world_size())
    values = layout.buffer()
    layout.view(values, parameter).copy_(torch.tensor([1.0, 2.0, 3.0]) * dist.get_rank())
    CompressedMean(layout, dist.group.WORLD)(values)
    middle = (dist.get_world_size() - 1) / 2
    return torch.equal(layout.view(values, parameter), torch.tensor([1.0, 2.0, 3.0]) * middle)


def matrices_alone() -> bool:
    """One number: the chunks of all ranks but the first are padding."""
    parameter = nn.Parameter(torch.zeros(1, 1))
    layout = FlatLayout([[parameter]], dist.get_world_size())
    values = layout.buffer()
    layout.view(values, parameter).fill_(-3.0)
    CompressedMean(layout, dist.group.WORLD)(values)
    return torch.equal(layout.view(values, parameter), torch.tensor([[-3.0]]))


# Bytes


class Counter:
    """The bytes that this rank sends by the collectives of torch.distributed, in rings."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []  # name, bytes, elements given

    @contextmanager
    def running(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
                if hasattr(dist, name):
                    patch.setattr(dist, name, self._counting(name, getattr(dist, name)))
            yield

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            tensor, ranks = given[0], dist.get_world_size()  # that a rank has at the end
            passes = 2 if name == "all_reduce" else 1
            self.calls.append((name, passes * tensor.nbytes * (ranks - 1) // ranks, tensor.numel()))
            return function(*given, **options)

        return counted

    @property
    def total(self) -> int:
        return sum(sent for _, sent, _ in self.calls)


def counted() -> dict[str, Any]:
    """Count what 20 steps send, of which 3 warm up; a bf16 model with a share of vectors as in GPT-2."""
    torch.manual_seed(0)
    width = 512
    layers = (
        nn.Linear(width, width, bias=False),
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width, bias=False),
    )
    model = nn.Sequential(*layers).bfloat16()
    optimizer = OneBitAdam(model.parameters(), freeze_step=3)
    ddp, steps = wrapped(optimizer, model), []
    for step in range(20):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).bfloat16()
        counter = Counter()
        with counter.running():
            ddp(x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        steps.append(([name for name, _, _ in counter.calls], counter.total))
    plain = Counter()
    with plain.running():
        dist.all_reduce(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return {"steps": steps, "plain": plain.total}


# Training


def warm_up() -> dict[str, list[bool]]:
    """Return for each option whether each step of the warm-up is bitwise torch's Adam or AdamW under DDP."""
    cases = {
        "Adam": (torch.optim.Adam, {}),
        "options": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-3}),
        "AdamW": (torch.optim.AdamW, {"weight_decay": 0.3}),
    }
    found = {}
    for name, (plain, options) in cases.items():
        ours, theirs = net(), net()
        optimizers = (
            OneBitAdam(ours.parameters(), freeze_step=9, **options),
            plain(theirs.parameters(), **options),
        )
        models = [
            wrapped(o, m, gradient_as_bucket_view=True)
            for o, m in zip(optimizers, (ours, theirs), strict=True)
        ]
        found[name] = []
        for step in range(8):
            for optimizer, model in zip(optimizers, models, strict=True):
                train(model, optimizer, range(step, step + 1))
            found[name].append(torch.equal(flat(ours), flat(theirs)))
    return found


MAKES: dict[str, Callable[..., OneBitAdam]] = {
    "OneBitAdam": lambda p, **o: OneBitAdam(p, lr=0.01, freeze_step=6, **o),
    "OneBitLamb": lambda p, **o: OneBitLamb(p, lr=0.01, freeze_step=6, **o),
    "ZeroOneAdam": lambda p, **o: ZeroOneAdam(
        p, lr=0.01, var_freeze_step=9, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4, **o
    ),
}
STEPS = 24


def losses_of(model: nn.Module) -> float:
    """Return the loss on batches that nobody trained on."""
    with torch.no_grad():
        return sum(model(batch(500 + i, rank=0)).item() for i in range(8))


def each_optimizer() -> dict[str, dict[str, Any]]:
    """Train with each optimizer, in fp32 and bf16, with groups and a scheduler."""
    found = {}
    for name, make in MAKES.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = net(dtype)
            before, unused = losses_of(net()), model.table.weight[5:].detach().clone()
            decayed, others = [model.inner.weight, model.out.weight], []
            others = [p for p in model.parameters() if all(p is not d for d in decayed)]
            groups = [
                {"params": decayed, "weight_decay": 0.01, "betas": (0.9, 0.99)},
                {"params": others, "eps": 1e-6},
            ]
            optimizer = make(groups)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
            ddp = wrapped(optimizer, model)
            for step in range(STEPS):
                train(ddp, optimizer, range(step, step + 1), dtype)
                scheduler.step()
            if isinstance(optimizer, ZeroOneAdam):
                optimizer.synchronize()
            found[f"{name} {dtype}"] = {
                "are_equal": are_equal(flat(model)),
                "losses": (before, losses_of(copy.deepcopy(model).float())),
                "unused": torch.equal(model.table.weight[5:], unused),
                "state": {t.dtype for s in optimizer.state.values() for t in s.values()},
                "frozen": optimizer.frozen,
            }
    return found


def plain_ways() -> dict[str, list[bool]]:
    """Return whether ranks stay equal in each of the ways that DDP is used in."""
    ways = {
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "small buckets": {"bucket_cap_mb": 0.001},
    }
    found: dict[str, list[bool]] = {}
    for way, options in ways.items():
        model = net()
        optimizer = MAKES["OneBitAdam"](model.parameters())
        ddp, found[way] = wrapped(optimizer, model, **options), []
        for step in range(12):
            # on one rank only, in the warm-up too: the gradient is that of the others, divided by all
            takes_side = way != "unused" or step % 3 == dist.get_rank()
            # a static graph cannot start in no_sync(): PyTorch 2.13 fails an assertion of its own
            with ddp.no_sync() if way != "static" else nullcontext():
                ddp(batch(2 * step), takes_side).backward()
            ddp(batch(2 * step + 1), takes_side).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            found[way].append(are_equal(flat(model)))
    return found


def without_register() -> dict[str, Any]:
    """Train without DDP, and with DDP that is not registered; compare with a registered one."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("te_transform.training.one_bit.optimizer")
    log.addHandler(handler)
    weights = {}
    for way in ("registered", "alone", "forgotten"):
        model = net()
        optimizer = MAKES["OneBitAdam"](model.parameters())
        if way == "registered":
            run = wrapped(optimizer, model)
        else:
            run = model if way == "alone" else DistributedDataParallel(model)
        train(run, optimizer, range(12))
        weights[way], is_equal = flat(model), are_equal(flat(model))
        messages.append(f"{way} {is_equal}")
    log.removeHandler(handler)
    return {"messages": messages, "weights": weights}


def scaled() -> dict[str, Any]:
    """Train with GradScaler; an infinity on the last rank alone skips the step on all."""
    model, plain = net(), net()
    optimizer = MAKES["OneBitAdam"](model.parameters())
    ddp = wrapped(optimizer, model)
    reference = MAKES["OneBitAdam"](plain.parameters())
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10), {"skipped": [], "are_equal": []}
    for step in range(14):
        before = flat(model)
        overflows = step in (3, 4, 9, 12)
        scaler.scale(ddp(batch(step))).backward()
        if overflows and dist.get_rank() == dist.get_world_size() - 1:
            model.out.weight.grad[0, 0] = float("inf")
        if step % 2:  # as clipping needs
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["skipped"].append(torch.equal(before, flat(model)) == overflows)
        found["are_equal"].append(are_equal(flat(model)))
    train(wrapped(reference, plain), reference, range(3))
    found["steps"] = optimizer.steps
    return found


def refused() -> dict[str, str]:
    """Return what is raised of what only several ranks can do wrong."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = net()
        zero = ZeroRedundancyOptimizer(model.parameters(), OneBitAdam)
        model(batch(0)).backward()
        try:
            zero.step()
        except OneBitError as error:
            found["ZeRO"] = str(error)
    model = net()
    optimizer = OneBitAdam(model.parameters())
    ddp = wrapped(optimizer, model)
    with pytest.raises(OneBitError) as caught, ddp.join():
        train(ddp, optimizer, range(1))
    found["join"] = str(caught.value)
    torch.manual_seed(dist.get_rank())
    model = Net()
    optimizer = OneBitAdam(model.parameters())
    model(batch(0)).backward()
    before = flat(model)
    with pytest.raises(OneBitError) as caught:
        optimizer.step()
    found["weights"] = str(caught.value)
    assert torch.equal(before, flat(model))
    assert not optimizer.state
    return found


def zero_one() -> dict[str, float]:
    """Return how far the weights move in phase 2 without gradients, by weight decay, and at a low rate."""
    found = {}
    for name, decay in (("decay", 0.5), ("low rate", 0.0)):
        model = net()
        optimizer = MAKES["ZeroOneAdam"](model.parameters(), weight_decay=decay)
        ddp = wrapped(optimizer, model)
        train(ddp, optimizer, range(15))
        optimizer.synchronize()
        before, group = flat(model), optimizer.param_groups[0]
        if decay:
            optimizer._exchange = None  # without errors and momenta
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        else:
            group["lr"] *= 1e-6
        for step in range(8):
            (ddp(batch(step)) * (0.0 if decay else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        expected = before * (1 - group["lr"] * decay) ** 8
        found[name] = (flat(model) - expected).abs().max().item() / group["lr"]
    return found


class Small(nn.Module):
    """Elements that are all used, a scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scalar = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 3] -> a loss."""
        return (x @ self.weight * self.scalar).square().mean() + self.empty.sum()


def small() -> dict[str, list[float]]:
    """Return the losses of a model of few elements, with each optimizer."""
    found: dict[str, list[float]] = {}
    for name, make in MAKES.items():
        model = Small()
        optimizer = make(model.parameters())
        ddp, found[name] = wrapped(optimizer, model), []
        for step in range(STEPS):
            loss = ddp(batch(step)[:, :3])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name].append(loss.item())
        optimizer.synchronize()
        assert are_equal(flat(model)), name
    return found


# Checkpoints


def saved(folder: Path) -> dict[str, Any]:
    """Train, save in both forms in the middle, go on, and resume from this rank's own state."""
    found = {}
    for name, make in MAKES.items():
        model = net()
        optimizer = make(model.parameters())
        ddp = wrapped(optimizer, model)
        train(ddp, optimizer, range(15))
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.synchronize()
        gathered = optimizer.gathered_state_dict()
        if dist.get_rank() == 0:
            torch.save((model.state_dict(), gathered), folder / f"{name}.pt")
        own = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(ddp, optimizer, range(15, STEPS))
        again = net()
        again.load_state_dict(own[0])
        other = make(again.parameters())
        other.load_state_dict(own[1])
        train(wrapped(other, again), other, range(15, STEPS))
        found[name] = torch.equal(flat(model), flat(again))
    dist.barrier()
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Go on from what other ranks have gathered."""
    found = {}
    for name, make in MAKES.items():
        weights, state = torch.load(folder / f"{name}.pt", weights_only=True)
        model = net()
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(state)
        errors = optimizer.gathered_state_dict()["state"]
        before = losses_of(model)
        train(wrapped(optimizer, model), optimizer, range(15, STEPS))
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.synchronize()
        found[name] = {
            "are_equal": are_equal(flat(model)),
            "losses": (before, losses_of(model)),
            "errors": [(state["state"][i], errors[i]) for i in errors],
        }
    return found


def rolled_back() -> dict[str, bool]:
    """Return whether a run repeats its steps bitwise after its optimizer loads an earlier state."""
    found = {}
    for name, make in MAKES.items():
        model = net()
        optimizer = make(model.parameters())
        ddp = wrapped(optimizer, model)
        train(ddp, optimizer, range(1))  # the first backward of DDP sums in other buckets
        for begin in (2, 5, 8, 15):
            train(ddp, optimizer, range(begin))
            weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(ddp, optimizer, range(begin, begin + 7))
            after = flat(model)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(ddp, optimizer, range(begin, begin + 7))
            found[f"{name} {begin}"] = torch.equal(after, flat(model))
    return found


def compiled() -> bool:
    """Return whether torch.compile() of step() changes nothing."""
    found = []
    for compiles in (False, True):
        model = net()
        optimizer = MAKES["OneBitAdam"](model.parameters())
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for number in range(10):
            model(batch(number)).backward()
            step()
            optimizer.zero_grad()
        found.append(flat(model))
    return torch.equal(*found)


def loaded_from_rank_0(folder: Path) -> bool:
    """Load rank 0's own state on each rank; return True if this rank has its errors."""
    model = net()
    optimizer = MAKES["OneBitAdam"](model.parameters())
    train(wrapped(optimizer, model), optimizer, range(9))
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states)
    other = MAKES["OneBitAdam"](net().parameters())
    other.load_state_dict(states[0])
    return any(
        state["errors"][:, 1:].any() for state in other.state_dict()["state"].values() if "errors" in state
    )


SAVED = ("OneBitAdam", 4), ("OneBitAdam", 15), ("OneBitLamb", 15), ("ZeroOneAdam", 15)  # at these steps
OPTIONS = {  # of get_state_dict() and set_state_dict()
    "OneBitAdam": StateDictOptions(),
    "OneBitLamb": StateDictOptions(flatten_optimizer_state_dict=True),
    "ZeroOneAdam": StateDictOptions(cpu_offload=True),
}


def checkpointed(folder: Path) -> dict[str, tuple[bool, bool]]:
    """Save by torch.distributed.checkpoint before and after the freeze, go on, and resume on as many ranks.

    Return whether the loaded state is bitwise the saved one, and the resumed run the one that went on.
    """
    found = {}
    for name, begin in SAVED:
        model = net()
        optimizer = MAKES[name](model.parameters())
        ddp = wrapped(optimizer, model)
        train(ddp, optimizer, range(begin))
        optimizer.synchronize()
        state = copy.deepcopy(optimizer.gathered_state_dict())
        dcp.save(checkpoint(ddp, optimizer, name), checkpoint_id=folder / f"{name} {begin}")
        train(ddp, optimizer, range(begin, STEPS))
        again, resumed = from_checkpoint(folder, name, begin)
        is_loaded = is_same(state, resumed.gathered_state_dict())
        train(again, resumed, range(begin, STEPS))
        found[f"{name} {begin}"] = is_loaded, torch.equal(flat(model), flat(again))
    return found


def checkpoint(ddp: nn.Module, optimizer: OneBitAdam, name: str) -> dict[str, Any]:
    states = get_state_dict(ddp, optimizer, options=OPTIONS[name])
    return dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))


def from_checkpoint(folder: Path, name: str, begin: int) -> tuple[nn.Module, OneBitAdam]:
    """Load what checkpointed() saved, on any number of ranks."""
    model = net()
    optimizer = MAKES[name](model.parameters())
    ddp = wrapped(optimizer, model)
    states = checkpoint(ddp, optimizer, name)
    dcp.load(states, checkpoint_id=folder / f"{name} {begin}")
    set_state_dict(ddp, optimizer, **states, options=OPTIONS[name])
    return ddp, optimizer


def is_same(one: Any, other: Any) -> bool:
    """Return True if two optimizer states are bitwise equal."""
    states = [(state, other["state"][key]) for key, state in one["state"].items()]
    names = all(a.keys() == b.keys() for a, b in states)
    return (
        names
        and all(torch.equal(a[n], b[n]) for a, b in states for n in a)
        and (one["param_groups"] == other["param_groups"])
    )


def resumed_from_checkpoint(folder: Path) -> dict[str, tuple[bool, float]]:
    """Return whether ranks are equal at the end, and the loss."""
    found = {}
    for name, begin in SAVED:
        ddp, optimizer = from_checkpoint(folder, name, begin)
        train(ddp, optimizer, range(begin, STEPS))
        optimizer.synchronize()
        found[f"{name} {begin}"] = are_equal(flat(ddp)), losses_of(ddp.module)
    return found


def everything(folder: Path) -> dict[str, Any]:
    """Return all of the above, of one group of processes."""
    works = exchanges, counted, warm_up, each_optimizer, plain_ways, without_register, scaled, refused
    found = {work.__name__: work() for work in (*works, zero_one, small, rolled_back, compiled)}
    here = folder / str(dist.get_world_size())
    if dist.get_rank() == 0:
        here.mkdir()
    dist.barrier()
    found["saved"] = saved(here)
    found["checkpointed"] = checkpointed(here)
    found["loaded_from_rank_0"] = loaded_from_rank_0(folder)
    if dist.get_world_size() == 4:
        found["resumed"] = resumed(folder / "2")
        found["resumed_from_checkpoint"] = resumed_from_checkpoint(folder / "2")
    return found


def resumed_from_four(folder: Path) -> dict[str, Any]:
    """Return what two ranks make of a run of four."""
    return {
        "resumed": resumed(folder / "4"),
        "resumed_from_checkpoint": resumed_from_checkpoint(folder / "4"),
    }
