"""Measure forms of the models of 2026 that no rule fuses: PyTorch's operations, and fewer kernels for them.

    python benchmarks/dropped_forms.py [gate low-rank streams delta mamba] [--tokens 8192]

| form | from |
| --- | --- |
| gate | an attention output times a sigmoid gate, and its projection, 4,096 wide (Qwen 3.5) |
| low-rank | a norm times a gate of rank 16, 4,096 wide (A.X K2) |
| streams | a hyper-connection with 20 Sinkhorn steps, 4 streams of 4,096, and their mixture (DeepSeek V4) |
| delta | a gated delta rule, 32 heads of 128 (Qwen 3.5) |
| mamba | a selective scan, 64 heads of 64, a state of 128 (Mamba-2) |

The fewer kernels are those of fla for delta and of mamba-ssm for mamba where they are installed, else
inductor's, which joins the passes that one kernel could join. Times are milliseconds of a forward and
backward. Contenders take turns in one process. Without a GPU, forms run on the CPU in a small size. Nothing
is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from command_line import positive
from torch import Tensor, nn
from transformers import AXK2Config, DeepseekV4Config
from transformers.models.axk2.modeling_axk2 import AXK2GatedRMSNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

GPU = torch.cuda.is_available()
DEVICE, WIDTH, ROUNDS, STEPS = ("cuda", 4096, 7, 10) if GPU else ("cpu", 64, 2, 1)
Form = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...], str]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("forms", nargs="*", choices=[*FORMS, []], help="default: all")
    parser.add_argument("--tokens", type=positive, default=8192 if GPU else 128)
    asked = parser.parse_args()
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"{device}, torch {torch.__version__}, {asked.tokens:,} tokens")
    for name in asked.forms or FORMS:
        own, fewer, inputs, whose = FORMS[name](asked.tokens)
        original, other = milliseconds(trained(own, inputs), trained(fewer, inputs))
        print(f"{name}: {original:.3f} ms, {whose} {other:.3f} ({other / original:.2f})", flush=True)


def milliseconds(*steps: Callable[[], object]) -> list[float]:
    """Return the median time of each step over the rounds, in which all steps take turns."""
    for step in steps:
        _seconds(step)
    times = [[_seconds(step) * 1e3 for step in steps] for _ in range(ROUNDS)]
    return [statistics.median(of_step) for of_step in zip(*times, strict=True)]


def _seconds(step: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if GPU else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - start) / STEPS


def trained(form: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return a function that runs a form forward and backward."""
    read = [tensor for tensor in inputs if tensor.requires_grad]
    grad = torch.ones_like(form(*inputs))
    return lambda: torch.autograd.grad(form(*inputs), read, grad)


def by_inductor(form: Callable[..., Tensor], *inputs: Tensor) -> Form:
    return form, torch.compile(form), inputs, "inductor's kernels"


def gate(tokens: int) -> Form:
    def projected(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x * torch.sigmoid(gate), weight)

    return by_inductor(projected, random(tokens, WIDTH), random(tokens, WIDTH), random(WIDTH, WIDTH))


def low_rank(tokens: int) -> Form:
    norm = AXK2GatedRMSNorm(AXK2Config(hidden_size=WIDTH)).to(DEVICE, torch.bfloat16)
    return by_inductor(called(norm), random(1, tokens, WIDTH), *norm.parameters())


def streams(tokens: int) -> Form:
    config = DeepseekV4Config(hidden_size=WIDTH)
    connection = DeepseekV4HyperConnection(config).to(DEVICE)
    for parameter in connection.parameters():
        nn.init.normal_(parameter, std=0.02)

    def mixed(streams: Tensor, *_: Tensor) -> Tensor:
        post, combined, collapsed = connection(streams)
        weights = combined.to(streams.dtype).transpose(-1, -2)
        return post.to(streams.dtype)[..., None] * collapsed[..., None, :] + weights @ streams

    return by_inductor(mixed, random(1, tokens, config.hc_mult, WIDTH), *connection.parameters())


def delta(tokens: int) -> Form:
    heads, width = max(WIDTH // 128, 2), 128
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    plain = getattr(rule, "__wrapped__", rule)
    q, k, v = (random(1, tokens, heads, width) for _ in range(3))
    decay = -torch.rand(1, tokens, heads, device=DEVICE, dtype=torch.float32)
    inputs = q, k, v, decay.requires_grad_(), torch.rand_like(decay).bfloat16().requires_grad_()

    def written(*inputs: Tensor) -> Tensor:
        return plain(*inputs, use_qk_l2norm_in_kernel=True)[0]

    if GPU and find_spec("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        def fast(*inputs: Tensor) -> Tensor:
            return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

        return written, fast, inputs, "fla"
    return by_inductor(written, *inputs)


def mamba(tokens: int) -> Form:
    heads, width, states, chunk = max(WIDTH // 64, 2), 64, 128, 64
    scan = modeling_mamba2.mamba2_chunk_scan
    plain = getattr(scan, "__wrapped__", scan)
    x, b, c = random(1, tokens, heads, width), random(1, tokens, 1, states), random(1, tokens, 1, states)
    dt = torch.rand(1, tokens, heads, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    decay = -torch.rand(heads, device=DEVICE, dtype=torch.float32)
    inputs = x, dt, decay.requires_grad_(), b, c

    def written(*inputs: Tensor) -> Tensor:
        return first(plain(*inputs, chunk_size=chunk))

    if GPU and find_spec("mamba_ssm"):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        def fast(*inputs: Tensor) -> Tensor:
            return first(mamba_chunk_scan_combined(*inputs, chunk_size=chunk))

        return written, fast, inputs, "mamba-ssm"
    return by_inductor(written, *inputs)


FORMS = {"gate": gate, "low-rank": low_rank, "streams": streams, "delta": delta, "mamba": mamba}


def first(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def called(module: nn.Module) -> Callable[..., Tensor]:
    """Return a function of the input and the parameters, whose gradients are asked for."""
    return lambda x, *_: module(x)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


if __name__ == "__main__":
    main()
