"""profile() on a GPU: kernels count for modules and sites, and slow fallbacks of kernels are found."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import Profile
from te_transform.command_line.main import main
from te_transform.profile.classes import ATTENTION, IDLE, OVERHEAD, PRODUCT
from tests.models.profiled import Attention, Block

WIDTH, LENGTH, BLOCKS = 256, 512, 4
BF16 = torch.bfloat16


def model(spelled: str = "fused", dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(Attention(spelled, WIDTH)) for _ in range(BLOCKS))).to("cuda", dtype)


def batch(length: int = LENGTH, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(4, length, WIDTH, device="cuda", dtype=dtype)


def profiled(made: nn.Module, x: Tensor) -> Profile:
    return te_transform.profile(made, x, plan=False)


def test_kernels_count_for_the_modules_that_launch_them() -> None:
    found = profiled(model(), batch())
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.profiled)
    assert sum(found.classes.values()) == pytest.approx(found.profiled)
    linear = next(part for part in found.parts if part.path == "{0..3}.mlp")
    assert 0 < linear.backward < linear.seconds
    assert linear.classes[PRODUCT] > 0
    attention = next(part for part in found.parts if part.path == "{0..3}.attention")
    assert attention.classes[ATTENTION] > 0


def test_a_gpu_that_waits_for_the_cpu_is_told() -> None:
    found = profiled(model(), batch(8))
    assert found.classes.get(IDLE, 0) + found.classes.get(OVERHEAD, 0) > 0.2 * found.profiled


@pytest.mark.parametrize(
    ("spelled", "what"),
    [
        ("written out", "written-out attention"),
        ("math", "math attention"),
        ("causal mask", "needless mask"),
    ],
)
def test_attention_without_its_kernels_is_found_and_its_gain_is_measured(spelled: str, what: str) -> None:
    finding = next(each for each in profiled(model(spelled), batch(2048)).findings if each.what == what)
    assert finding.where == "{0..3}.attention"
    assert finding.basis == "measured"
    assert 0 < finding.gain < finding.seconds


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum() > 0 else x


def test_a_host_sync_is_found() -> None:
    made = nn.Sequential(Reads(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to("cuda", BF16)
    (finding,) = [each for each in profiled(made, batch()).findings if each.what == "host sync"]
    assert finding.where == "0"
    assert "bool at " in finding.evidence


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_in_fp8_is_profiled_by_its_sites(compiled: bool) -> None:
    """The kernels of compiled code count for the model as a whole."""
    made = te_transform.convert(model(), batch(), verify=False, recipe="fp8-delayed", compile=compiled)
    for _ in range(3):
        made(batch()).sum().backward()
    found = te_transform.profile(made, batch())
    assert {site.status for site in found.sites} == {"fused"}
    assert ({"attention", "layernorm_linear"} <= {part.rule for part in found.parts}) is not compiled
    assert found.classes[PRODUCT] > 0
    assert sum(found.classes.values()) == pytest.approx(found.profiled)


FACTORY = """
from torch import nn

def made():
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
"""


def test_the_command_profiles_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiled_on_gpu.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["profile", "profiled_on_gpu:made", "--input", "8x256", "--no-plan", "--device", "cuda"]
    assert main([*asked, "--budget", "100s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"].startswith("NVIDIA")
    assert main([*asked, "--budget", "0.001us"]) == 1
