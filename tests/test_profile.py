"""profile(): what each part of a step costs, what is slow, and that the model stays what it was."""

import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform import InputError, ModelError, OptionError, Profile, TraceError
from te_transform.command_line.main import main
from te_transform.execution.attach import runner_of
from te_transform.graph.inputs import as_inputs
from te_transform.profile import classes, steps
from te_transform.profile.analysis import Analysis
from te_transform.profile.classes import COMMUNICATION, IDLE, OVERHEAD, operation_class
from te_transform.profile.events import Event
from te_transform.profile.findings import findings
from te_transform.profile.ranges import OUTSIDE, PREFIX, STEP, Label
from te_transform.profile.result import RankTime
from te_transform.profile.steps import RecordedSteps, record
from te_transform.profile.timeline import slices_of
from te_transform.profile.tree import ops_of
from te_transform.profile.trials import Replacement, Replacements
from tests import ranks
from tests.bitwise import untouched
from tests.models.profiled import Attention, Block
from tests.zoo import seeded

WIDTH, LENGTH = 16, 8
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def model(spelled: str = "fused", layers: int = 2) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(Block(Attention(spelled)) for _ in range(layers))))


def profiled(made: nn.Module, batch: object = X) -> Profile:
    return te_transform.profile(made, batch, plan=False)


def part(found: Profile, path: str, rule: str = "") -> object:
    (one,) = (part for part in found.parts if part.path == path and part.rule == rule)
    return one


def by_name(found: Profile) -> dict[str, object]:
    return {finding.what: finding for finding in found.findings}


# What each part costs


def test_parts_and_classes_add_up_to_the_step() -> None:
    found = profiled(model())
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.profiled)
    assert sum(found.classes.values()) == pytest.approx(found.profiled)
    for each in found.parts:
        assert sum(each.classes.values()) == pytest.approx(each.seconds)
        assert 0 <= each.backward <= each.seconds


def test_equal_layers_are_one_part() -> None:
    found = profiled(model(layers=3))
    assert part(found, "{0..2}.attention.qkv").count == 3
    assert {part.path for part in found.parts} == {
        "outside of modules",
        "(the model itself)",
        *(
            "{0..2}" + name
            for name in ("", ".norm", ".attention", ".mlp", ".attention.qkv", ".attention.out")
        ),
    }


def test_operations_count_for_the_innermost_module() -> None:
    found = profiled(model())
    assert "products" in part(found, "{0,1}.mlp").classes
    assert "attention" in part(found, "{0,1}.attention").classes
    assert "norms" in part(found, "{0,1}.norm").classes
    assert not {"products", "norms"} & part(found, "{0,1}").classes.keys()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(Attention()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_backward_counts_for_the_module_of_the_forward(reentrant: bool) -> None:
    for found in (profiled(model(layers=1)), profiled(Checkpointed(reentrant))):
        owners = {each.path for each in found.parts if each.backward and "products" in each.classes}
        assert {path.rpartition(".")[2] for path in owners} == {"qkv", "out", "mlp"}


def test_a_model_in_evaluation_mode_runs_only_the_forward() -> None:
    found = profiled(model().eval())
    assert found.mode == "forward"
    assert not any(part.backward for part in found.parts)
    assert any("call model.train()" in note for note in found.notes)


def test_a_step_runs_on_each_batch_of_a_list() -> None:
    found = profiled(model(), [X, X[:1]])
    assert found.inputs == "float32[2, 8, 16]; float32[1, 8, 16]"


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        pytest.param((9, 1.2, 1.1, 1.2, 7), [1.2, 1.1, 1.2], id="the first three alike"),
        pytest.param((9, 3, 1, 5, 2, 7), [1, 5, 2], id="the last three, if none are alike"),
    ],
)
def test_steps_are_timed_as_soon_as_they_take_alike(
    taken: tuple[float, ...], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([time for start, seconds in enumerate(taken) for time in (10 * start, 10 * start + seconds)])
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert record(model(), as_inputs(model(), X)).seconds == pytest.approx(expected)
    assert next(clock, None) is None  # one more step ran under the profiler


CLASSES = {
    "aten::addmm": classes.PRODUCT,
    "aten::convolution_backward": classes.PRODUCT,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": classes.ATTENTION,
    "aten::native_layer_norm_backward": classes.NORM,
    "aten::cat": classes.COPY,
    "aten::gelu": classes.ELEMENTWISE,
    "aten::_softmax": classes.ELEMENTWISE,
    "aten::transpose": OVERHEAD,
    "aten::linear": OVERHEAD,
    "autograd::engine::evaluate_function: MmBackward0": OVERHEAD,
    "_LayerNormLinear": OVERHEAD,
    "FSDP::all_gather (0)": OVERHEAD,
    "c10d::allreduce_": COMMUNICATION,
    "gloo:all_reduce": COMMUNICATION,
    "Torch-Compiled Region: 0/0": classes.COMPILED,
    "flash_attn::_flash_attn_forward": classes.ATTENTION,
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_operation_has_a_class(name: str) -> None:
    assert operation_class(name) == CLASSES[name]


KERNELS = {
    "ampere_bf16_s16816gemm_bf16_128x64": classes.PRODUCT,
    "nvjet_tst_128x256": classes.PRODUCT,
    "void flash_fwd_kernel<Flash_fwd>": classes.ATTENTION,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": COMMUNICATION,
    "Memcpy DtoH (Device -> Pageable)": classes.COPY,
    "my_own_kernel": classes.ELEMENTWISE,
    "void at::native::vectorized_elementwise_kernel<4>": classes.ELEMENTWISE,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_a_class(name: str) -> None:
    assert classes.kernel_class(name) == KERNELS[name]


# The timeline


def kernel(name: str, start: int, end: int, launcher: int = 0) -> Event:
    return Event(name, start, end, launcher=launcher, is_kernel=True)


def sliced(*events: Event) -> list[tuple[int, int, int, str]]:
    step = Event(STEP, 0, 100, identity=1)
    ops = ops_of((step, *events), [OUTSIDE, Label("h.0", "Linear"), Label("h.1", "RMSNorm")])
    slices = slices_of(ops, (step, *events))
    assert sum(each.taken for each in slices) == 100
    return [(each.start, each.end, each.op.label, each.kind) for each in slices]


def test_a_gpu_waits_for_the_next_kernel() -> None:
    first, second = Event(f"{PREFIX}1", 0, 10), Event(f"{PREFIX}2", 10, 20)
    mm, add = Event("aten::mm", 2, 4, identity=2), Event("aten::add", 12, 14, identity=3)
    kernels = kernel("gemm", 10, 40, 2), kernel("elementwise", 60, 90, 3)
    assert sliced(first, mm, second, add, *kernels) == [
        (0, 10, 1, IDLE),
        (10, 40, 1, classes.PRODUCT),
        (40, 60, 2, IDLE),
        (60, 90, 2, classes.NORM),
        (90, 100, 0, IDLE),
    ]


def test_an_operation_does_not_cost_the_wait_before_it() -> None:
    step, mm = Event(STEP, 0, 100, identity=1), Event("aten::mm", 2, 4, identity=2)
    recording = RecordedSteps(True, [1e-7], [step, mm, kernel("gemm", 80, 90, 2)], [OUTSIDE])
    found = Analysis(nn.Linear(1, 1), recording)
    assert found.within(found.ops[1]) == 10
    assert found.total == 100


def test_communication_is_exposed_where_no_kernel_runs_beside_it() -> None:
    mm, reduce = Event("aten::mm", 0, 1, identity=2), Event("c10d::allreduce_", 1, 2, identity=3)
    kernels = (
        kernel("gemm", 0, 50, 2),
        kernel("ncclDevKernel_AllReduce", 20, 80, 3),
        kernel("gemm", 70, 100, 2),
    )
    assert sliced(mm, reduce, *kernels) == [
        (0, 20, 0, classes.PRODUCT),
        (20, 50, 0, classes.PRODUCT),
        (50, 70, 0, COMMUNICATION),
        (70, 100, 0, classes.PRODUCT),
    ]


def test_communication_on_a_cpu_is_exposed_while_it_computes_nothing() -> None:
    reduce = Event("gloo:all_reduce", 10, 60, thread=2, is_async=True)
    assert sliced(Event("aten::mm", 20, 40), reduce) == [
        (0, 10, 0, OVERHEAD),
        (10, 20, 0, COMMUNICATION),
        (20, 40, 0, classes.PRODUCT),
        (40, 60, 0, COMMUNICATION),
        (60, 100, 0, OVERHEAD),
    ]


def trained(number: int) -> Profile:
    made = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    made(X).sum().backward()
    before = [(parameter, parameter.grad, parameter.grad.clone()) for parameter in made.parameters()]
    found = te_transform.profile(made, X)
    assert all(p.grad is grad and torch.equal(grad, was) for p, grad, was in before)
    return json.loads(found.to_json())


@pytest.mark.xdist_group("distributed")
def test_ranks_see_their_steps_and_communication(tmp_path: Path) -> None:
    one, other = ranks.spawn(trained, 2, tmp_path, 0)
    assert one["ranks"] == other["ranks"]
    assert [rank["rank"] for rank in one["ranks"]] == [0, 1]
    assert one["sites"]
    assert all(site["path"].startswith("module.") and site["seconds"] > 0 for site in one["sites"])
    for found, rank in zip((one, other), one["ranks"], strict=True):
        assert rank == {
            "rank": rank["rank"],
            "seconds": found["seconds"],
            "exposed": found["classes"][COMMUNICATION],
        }


# Findings


def test_nothing_is_found_in_a_fused_model() -> None:
    assert profiled(model()).findings == profiled(model("other mask")).findings == ()


ATTENTIONS = {
    "written out": ("written-out attention", "[4, 8, 8] is written out with a mask"),
    "dropout": ("written-out attention", "[4, 8, 8] is written out with dropout"),
    "no dropout": ("written-out attention", "[4, 8, 8] is written out"),
    "math": ("math attention", "ran on [2, 2, 8, 8]"),
    "causal mask": ("needless mask", "hides what is_causal=True hides"),
    "causal mask of -1e9": ("needless mask", "hides what is_causal=True hides"),
    "full mask": ("needless mask", "hides nothing in this batch"),
}


@pytest.mark.parametrize("spelled", ATTENTIONS)
def test_attention_that_is_not_fused_is_found(spelled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: 0.25)
    (finding,) = profiled(model(spelled)).findings
    what, evidence = ATTENTIONS[spelled]
    assert finding.what == what
    assert finding.where == "{0,1}.attention"
    assert finding.count == 2
    assert finding.evidence.endswith(evidence)
    assert finding.basis == "measured"
    assert finding.gain == pytest.approx(0.75 * finding.seconds, abs=1e-9)  # whole nanoseconds


def test_a_change_is_tried_on_the_same_shapes() -> None:
    tried = Replacements(torch.device("cpu"), seconds=60.0)
    made = model("written out")
    (finding,) = findings(Analysis(made, record(made, as_inputs(made, X))), tried)
    assert finding.basis == "measured"
    assert len(tried.shares) == 1
    assert tried.seconds < 60.0


def test_math_attention_is_tried_with_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Biased(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)[:, None]
            scores = (x @ x.mT).relu()  # a mask with a gradient has no fused kernel
            return F.scaled_dot_product_attention(x, x, x, scores)

    tried = []
    monkeypatch.setattr(Replacements, "share", lambda self, trial, taken: tried.append(trial))
    finding = by_name(profiled(nn.Sequential(Biased(WIDTH, WIDTH))))["math attention"]
    assert finding.evidence.endswith("with a mask")
    assert all(each.keywords["masked"] for trial in tried for each in (trial.before, trial.after))


def test_a_trained_mask_is_not_needless() -> None:
    class Biased(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.mask = nn.Parameter(torch.zeros(LENGTH, LENGTH))  # hides nothing before the first step

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)[:, None]
            return F.scaled_dot_product_attention(x, x, x, self.mask)

    assert "needless mask" not in by_name(profiled(nn.Sequential(Biased())))


def test_an_untried_change_gains_at_most_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: None)
    (finding,) = profiled(model("written out")).findings
    assert finding.basis == "upper bound"
    assert finding.gain == finding.seconds
    assert finding.gain_told.startswith("at most ")


def test_a_change_that_cannot_run_is_not_measured() -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    tried = Replacements(torch.device("cpu"), seconds=60.0)
    assert tried.share(Replacement(((2, 2),), torch.float32, torch.neg, fails, False, "fails"), 0.0) is None


def test_a_change_that_gains_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: 1.5)
    (finding,) = profiled(model("math")).findings
    assert finding.gain == 0
    assert finding.gain_told == "nothing on this device, measured"


class Syncs(nn.Module):
    def __init__(self, read: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.read(x)
        return x


SYNCS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: 1 if x.sum() > 0 else 2,
    "float": lambda x: float(x.detach().sum()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "getitem": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: str(x),
}


@pytest.mark.parametrize("name", SYNCS)
def test_a_host_sync_is_found_with_its_line(name: str) -> None:
    (finding,) = profiled(nn.Sequential(Syncs(SYNCS[name]))).findings
    line = SYNCS[name].__code__.co_firstlineno
    assert finding.what == "host sync"
    assert finding.where == "0"
    assert f"{name} at " in finding.evidence
    assert f"test_profile.py:{line} runs 1 time" in finding.evidence


@pytest.mark.parametrize(
    "read", [lambda x: x[0], lambda x: x[:, :2], lambda x: x.to("cpu"), lambda x: torch.where(x > 0, x, 0)]
)
def test_other_calls_are_no_host_sync(read: Callable[[Tensor], object]) -> None:
    assert not profiled(Syncs(read)).findings


class Scan(nn.Module):
    """A recurrence over positions."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.linear, self.named = nn.Linear(WIDTH, WIDTH), named

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return selective_scan(x) if self.named else looped(x)


def looped(x: Tensor) -> Tensor:
    state, outs = torch.zeros_like(x[:, 0]), []
    for position in range(x.shape[1]):
        state = 0.9 * state + x[:, position]
        outs.append(state)
    return torch.stack(outs, 1)


def selective_scan(x: Tensor) -> Tensor:
    return (x.flip(1).cumsum(1) * 0.5).flip(1)


def test_a_recurrence_in_pytorch_is_found() -> None:
    long = X.repeat(1, 8, 1)
    (finding,) = profiled(nn.Sequential(Scan(named=False)), long).findings
    assert finding.what == "recurrence in PyTorch"
    assert finding.where == "0"
    assert "runs 64 times in one call" in finding.evidence
    assert finding.basis == "upper bound"
    (finding,) = profiled(nn.Sequential(Scan(named=True))).findings
    assert finding.evidence.startswith("selective_scan() in ")
    assert "mamba-ssm" in finding.advice


def of_shards() -> list[str]:
    sharded = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(32)))
    for block in sharded:
        fully_shard(block)
    return [finding.what for finding in te_transform.profile(fully_shard(sharded), X, plan=False).findings]


@pytest.mark.xdist_group("distributed")
def test_the_hooks_of_fully_shard_are_no_recurrence(tmp_path: Path) -> None:
    assert ranks.spawn(of_shards, 1, tmp_path) == [[]]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        chosen, out = torch.arange(len(x)) % 4, torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]))
        return out


def test_a_loop_over_experts_gains_at_most_what_is_no_product() -> None:
    found = profiled(nn.Sequential(Experts()))
    finding = by_name(found)["expert loop"]
    assert finding.where == "0"
    assert "runs 4 experts one by one" in finding.evidence
    inside = [each for each in found.parts if each.path in ("0", "0.experts.{0..3}")]
    scale = min(1.0, found.seconds / found.profiled)
    assert finding.seconds == pytest.approx(scale * sum(each.seconds for each in inside))
    products = sum(each.classes.get("products", 0.0) for each in inside)
    assert finding.gain == pytest.approx(finding.seconds - scale * products)


class DenseExperts(nn.Module):
    """Experts that compute all tokens; each token chooses some of them afterwards."""

    def __init__(self, spelled: str, chosen: int = 1) -> None:
        super().__init__()
        self.router, self.spelled, self.chosen = nn.Linear(WIDTH, 4), spelled, chosen
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, -2)
        scores, chosen = self._choose(self.router(x).softmax(-1))
        weights = torch.zeros(len(x), 4).scatter(-1, chosen, scores)
        if self.spelled == "loop":
            return sum(expert(x) * weights[:, i, None] for i, expert in enumerate(self.experts))
        stacked = torch.stack([expert.weight for expert in self.experts])
        if self.spelled == "einsum":
            return torch.einsum("te,xfe->txf", x, stacked).mul(weights[..., None]).sum(1)
        return (x.expand(4, -1, -1) @ stacked.mT * weights.t()[..., None]).sum(0)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.spelled == "max":
            return scores.max(-1, keepdim=True)
        if self.spelled == "argmax":
            return scores.amax(-1, keepdim=True), scores.argmax(dim=-1, keepdim=True)
        return scores.topk(self.chosen)


@pytest.mark.parametrize("spelled", ["loop", "batched", "einsum", "argmax", "max"])
def test_experts_that_compute_every_token_are_found(spelled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: None)
    found = profiled(nn.Sequential(DenseExperts(spelled), DenseExperts("loop", chosen=4)))
    finding = by_name(found)["dense experts"]
    assert finding.where == "0"
    assert "each of 4 experts computes all 16 tokens, which choose 1 at " in finding.evidence
    assert finding.gain == pytest.approx(0.75 * finding.seconds, abs=1e-9)  # whole nanoseconds
    assert 0 < finding.seconds < found.seconds


def test_fewer_tokens_per_expert_are_tried() -> None:
    tried: list[Replacement] = []

    class Trials(Replacements):
        def share(self, trial: Replacement, taken: float) -> float | None:
            tried.append(trial)
            return super().share(trial, taken)

    made = nn.Sequential(DenseExperts("batched", chosen=2))
    findings(Analysis(made, record(made, as_inputs(made, X))), Trials(X.device, 100.0))
    (trial,) = (trial for trial in tried if trial.name == "product of 8 rows")
    assert trial.before(*map(torch.ones, trial.shapes)).shape == (4, 16, WIDTH)
    assert trial.after(*map(torch.ones, trial.shapes)).shape == (4, 8, WIDTH)


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def test_products_in_fp32_are_found_where_bf16_was_intended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: None)  # a small one that gains nothing is not told
    with torch.autocast("cpu", torch.bfloat16):
        (finding,) = profiled(Island()).findings
    assert finding.what == "fp32 products"
    assert finding.where == "head"
    assert "bfloat16" in finding.advice
    mixed = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)).to(torch.bfloat16)
    mixed[1].forward = lambda x, head=mixed[1]: F.linear(x.float(), head.weight.float())
    (finding,) = profiled(mixed, X.bfloat16()).findings
    assert finding.where == "1"
    assert "products run in float32" in finding.evidence
    assert not profiled(Island()).findings


class Angles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        frequencies, positions = (
            self.weight[0].detach().float(),
            torch.arange(x.shape[1], dtype=torch.float32),
        )
        return super().forward(x) + (frequencies[:, None] @ positions[None]).cos().sum().to(x.dtype)


def test_rotary_angles_stay_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "share", lambda *_: None)
    assert not profiled(Angles(WIDTH, WIDTH).to(torch.bfloat16), X.bfloat16()).findings


class WrittenOutNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class WideNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape).to(x.dtype)


def test_norms_in_fp32_are_found_where_bf16_was_intended() -> None:
    tried: list[Replacement] = []

    class Trials(Replacements):
        def share(self, trial: Replacement, taken: float) -> float | None:
            tried.append(trial)
            return 0.25

    made = nn.Sequential(WrittenOutNorm(), nn.Linear(WIDTH, WIDTH), WideNorm(WIDTH), nn.LayerNorm(WIDTH))
    recording = record(made.to(torch.bfloat16), as_inputs(made, X.bfloat16()))
    found = Analysis(made, recording)
    (finding,) = findings(found, Trials(X.device, 1.0))
    assert (finding.what, finding.where, finding.count) == ("fp32 norms", "{0,2}", 2)
    assert finding.evidence.startswith(f"norms run in float32, such as {[*X.shape]} ")
    assert finding.evidence.endswith(("written out", "as layer_norm"))
    assert (finding.gain, finding.basis) == (pytest.approx(0.75 * finding.seconds), "measured")
    assert len(tried) == 2
    for trial in tried:
        x = X.bfloat16().requires_grad_()
        torch.testing.assert_close(trial.before(x), trial.after(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert "fp32 norms" not in by_name(profiled(nn.Sequential(nn.LayerNorm(WIDTH), Island())))


class Changes(nn.Module):
    """Compiled code that depends on a number, which each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.number


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Changes()
        self.inner.compile(backend="eager", dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.number += 1
        return self.inner(x)


def test_a_recompilation_is_found() -> None:
    finding = by_name(profiled(Caller()))["recompilation"]
    assert "number == " in finding.evidence
    assert finding.basis == "upper bound"
    assert finding.gain > 0


def test_no_gain_exceeds_the_timed_step() -> None:
    made = nn.Sequential(Experts())
    recording = record(made, as_inputs(made, X))
    recording.seconds = [1e-9]
    found = findings(Analysis(made, recording), Replacements(torch.device("cpu"), seconds=0.0))
    assert all(finding.gain <= finding.seconds <= 1e-9 for finding in found)


def test_findings_are_ranked_by_gain() -> None:
    gains = [finding.gain for finding in profiled(nn.Sequential(model("written out"), Experts())).findings]
    assert len(gains) > 2
    assert gains == sorted(gains, reverse=True)


# Converted and compiled models


def test_a_converted_model_is_profiled_by_its_sites(at_any_size: None) -> None:
    made = te_transform.convert(model("written out"), X, backend="torch", verify=False)
    made(X).sum().backward()
    captured = te_transform.report(made).fallbacks
    found = te_transform.profile(made, X)
    assert part(found, "{0,1}.attention", "attention").count == 2
    assert {site.status for site in found.sites} == {"fused"}
    assert found.report.counts["attention"] == 2
    assert te_transform.report(made).fallbacks == captured
    assert not any("labels" in type(each).__name__ for graph in graphs(made) for each in graph.executors)


def test_a_converted_model_that_gains_nothing_is_profiled_by_its_modules() -> None:
    """Such calls may run the user's own code, in which modules have no labels."""
    made = te_transform.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), X, backend="torch")
    paths = [part.path for part in te_transform.profile(made, X).parts]
    assert {"0", "1"} <= {*paths}


def graphs(made: nn.Module) -> list:
    return runner_of(made).graphs


def test_a_compiled_model_is_not_compiled_again() -> None:
    torch._dynamo.reset()  # other tests' compilations of the class count toward dynamo's limit
    made = torch.compile(model(), backend="aot_eager")
    found = profiled(made)
    assert not found.findings
    assert "compiled code" in part(found, "(the model itself)").classes


@torch.compile(backend="eager")
def compiled_function(x: Tensor) -> Tensor:
    return x.sin().cos()


class Mixed(nn.Module):
    """A scripted module, and a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return compiled_function(self.scripted(x))


def test_scripted_modules_and_compiled_functions_count_for_the_module_around() -> None:
    found = profiled(nn.Sequential(Mixed()))
    assert "products" in part(found, "0").classes
    assert found.findings == ()


def test_the_plan_of_a_conversion_is_told() -> None:
    found = te_transform.profile(model("written out"), X)
    (site,) = (site for site in found.sites if site.rule == "attention")
    assert site.path == "{0,1}.attention"
    assert site.count == 2
    assert site.seconds > 0
    assert not site.inactive


def test_fused_sites_that_run_unfused_are_told_apart(tmp_path: Path) -> None:
    """Their time is not what a conversion changes."""
    found = te_transform.profile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), X)
    (site,) = found.sites
    why = "in plain PyTorch, a linear by itself stays as it is"
    assert (site.status, site.inactive) == ("fused", why)
    assert json.loads(found.to_json())["sites"][0]["inactive"] == why
    assert "linear, inactive" in str(found)
    assert f"- {why}" in str(found)
    assert "no slow fallback was found" in found.notes
    found.to_html(tmp_path / "profile.html")
    assert "no slow fallback was found</li>" in (tmp_path / "profile.html").read_text("utf-8")


# The model stays what it was


class Everything(nn.Module):
    """Writes to a buffer, draws random numbers, counts calls, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.calls, self.fails = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(LENGTH),
            0,
            fails,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no forward today")
        return F.dropout(self.norm(self.linear(x))) * random.random()


@pytest.mark.parametrize("train", [True, False])
def test_the_model_stays_bitwise_what_it_was(train: bool) -> None:
    made = Everything().train(train)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    with untouched(made):
        profiled(made)


def test_trials_draw_no_random_numbers_of_the_user() -> None:
    made = model("written out", layers=8)
    with untouched(made):
        profiled(made)


def test_hooks_that_step_an_optimizer_do_not_run() -> None:
    made, stepped = Everything(), []
    for parameter in made.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    with untouched(made):
        profiled(made)
    assert not stepped
    made(X).sum().backward()
    assert len(stepped) == 4


# What has no backward


class Constant(nn.Module):
    """A linear whose output requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


NO_BACKWARD = {
    "evaluation": (lambda: model().eval(), "the model is in evaluation mode; call model.train()"),
    "frozen": (lambda: model().requires_grad_(False), "no parameter requires a gradient; profile a model"),
    "constant": (Constant, "no output requires a gradient; return the loss"),
}


@pytest.mark.parametrize("which", NO_BACKWARD)
def test_a_step_without_a_backward_says_why(which: str) -> None:
    made, why = NO_BACKWARD[which]
    found = profiled(made())
    assert found.mode == "forward"
    assert f"only the forward ran, because {why}" in found.notes[0]


def test_a_traced_module_is_profiled() -> None:
    assert profiled(torch.jit.trace(model(), X)).seconds > 0


# What cannot be profiled


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


WRONG = {
    "writes": (lambda: profiled(Writes(WIDTH, WIDTH)), ModelError, "hold such values in buffers"),
    "a class": (lambda: te_transform.profile(nn.Linear, X), ModelError, "expected a"),
    "on meta": (lambda: profiled(nn.Linear(2, 2, device="meta")), ModelError, "to_empty"),
    "lazy": (lambda: profiled(nn.LazyLinear(2)), ModelError, "expected tensors with shapes"),
    "a batch of text": (lambda: profiled(Everything(), "text"), InputError, "tokenizer"),
    "plan": (lambda: te_transform.profile(Everything(), X, plan="no"), OptionError, "True or False"),
    "a keyword": (
        lambda: te_transform.profile(Everything(), X, plans=True),
        TypeError,
        "did you mean 'plan'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_told(what: str) -> None:
    call, error, told = WRONG[what]
    with pytest.raises(error, match=told):
        call()


def test_a_running_profiler_is_told() -> None:
    with torch.profiler.profile(), pytest.raises(OptionError, match="outside of"):
        profiled(Everything())


@pytest.mark.parametrize("batch", [X, X[..., :3]])
def test_a_model_that_fails_stays_what_it_was(batch: Tensor) -> None:
    made = Everything(fails=batch is X)
    with untouched(made), pytest.raises(TraceError, match="failed on the example inputs"):
        profiled(made, batch)


# Output


def test_the_profile_prints_and_saves(tmp_path: Path) -> None:
    found = te_transform.profile(model("written out"), X)
    text = str(found)
    for told in (found.title, "{0,1}.mlp x2", "products", "1. written-out attention", "attention, fused"):
        assert told in text
    data = json.loads(found.to_json())
    assert data["schema"] == 2
    assert data["seconds"] == found.seconds
    assert [each["path"] for each in data["parts"]] == [part.path for part in found.parts]
    replace(found, ranks=(RankTime(0, 1.5, 0.25),)).to_html(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text("utf-8")
    for told in (
        "written-out attention",
        found.inputs,
        "What each part takes",
        ">1.5 s</td>",
        ">250 ms</td>",
    ):
        assert told in page


def told_in(found: Profile, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(found)
    return console.file.getvalue().splitlines()


def test_a_narrow_terminal_shows_fewer_columns_and_whole_paths() -> None:
    found = profiled(model())
    heads = {
        40: ["part", "time", "share"],
        60: ["part", "time", "share", "backward"],
        140: ["part", "class", "time", "share", "backward", "mostly"],
    }
    for width, head in heads.items():
        lines = told_in(found, width)
        assert next(line for line in lines if line.startswith("part")).split() == head
        assert max(map(len, lines)) <= width
        assert any(line.startswith("{0,1}.attention.qkv x2 ") for line in lines)


def test_lines_of_a_finding_are_indented_on_a_narrow_terminal() -> None:
    lines = told_in(te_transform.profile(model("written out"), X, plan=False), 60)
    first = next(number for number, line in enumerate(lines) if line.startswith("1. "))
    assert all(line.startswith("   ") for line in lines[first + 1 : first + 4])


FACTORY = """
from torch import nn

def made():
    return nn.Sequential(nn.Linear(16, 16))
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "profiled_factory.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "profiled_factory:made"


def test_the_command_fails_over_the_budget(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["profile", factory, "--input", "2x16", "--no-plan"]
    assert main([*asked, "--budget", "100s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Sequential"
    assert main([*asked, "--budget", "0.001us"]) == 1
    assert "expected a step of at most 0.001 us, got " in capsys.readouterr().err


def test_the_command_prints_to_a_terminal_without_utf_8(
    factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", file)
    assert main(["profile", factory, "--input", "2x16", "--no-plan"]) == 0
    file.seek(0)
    assert "-----" in file.read()


@pytest.mark.parametrize("budget", ["120", "ms", "0ms", "-1ms", "1 hour"])
def test_a_malformed_budget_is_told(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "a:b", f"--budget={budget}"])
    assert f"such as 120ms, 1.5s or 900us, got {budget!r}" in capsys.readouterr().err


def test_a_missing_gpu_is_told(
    factory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", factory, "--device", "cuda"]) == 2
    assert "expected a GPU for --device cuda, got none" in capsys.readouterr().err
