"""Compare single ops of models of 2026 on a GPU: te_transform's and PyTorch's, forward and backward.

    python benchmarks/single_ops.py [router pairs deepseek sequences products] [--tokens 8192]

| op | from |
| --- | --- |
| router | a router in fp32, with the sizes of Qwen3 30B and DeepSeek V3 |
| pairs | a rotation of neighboring columns (GLM) |
| deepseek | a rotation of neighboring columns, which moves them half a head apart (DeepSeek) |
| sequences | a rotation by other angles in each sequence |
| products | FP8 products of a layer of Llama 3 8B, by the fastest algorithm of cuBLAS, without a backward |

Times are milliseconds of a forward and backward. Contenders take turns in one process. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import measure
import torch
import with_te  # noqa: F401
from command_line import on_gpu, positive
from torch import Tensor

from te_transform.backends import cublas, plain
from te_transform.backends.fp8.ops import multiply

ROUNDS, STEPS, HEADS, WIDTH = 7, 20, 32, 128
Step = Callable[[], object]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("ops", nargs="*", choices=[*OPS, []], help="default: all")
    parser.add_argument("--tokens", type=positive, default=8192)
    asked = on_gpu(parser, "transformer_engine")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.tokens:,} tokens")
    for name in asked.ops or OPS:
        for what, *steps in OPS[name](asked.tokens):
            original, ours = milliseconds(*steps)
            ratio = ours / original
            print(f"{name}, {what}: {original:.3f} ms, te_transform {ours:.3f} ({ratio:.2f})", flush=True)


def milliseconds(*steps: Step) -> list[float]:
    """Return the median time of each step over the rounds, in which all steps take turns."""
    times = [[measure.in_a_row(step, STEPS) * 1e3 for step in steps] for _ in range(ROUNDS)]
    return [statistics.median(of_step) for of_step in zip(*times, strict=True)]


def router(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    from te_transform.backends import te

    for width, experts in ((2048, 128), (7168, 256)):
        x, weight = random(tokens, width), random(experts, width)
        ops = plain.WideLinear(), te.WideLinear()
        yield f"{width} x {experts}", *(trained(op, x, weight, None) for op in ops)


def pairs(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    from te_transform.backends import te

    x, angles = queries(1, tokens), frequencies(1, tokens).repeat_interleave(2, -1)
    ops = plain.Rotary(in_pairs=True), te.Rotary(in_pairs=True)
    yield f"{HEADS} heads of {WIDTH}", *(trained(op, x, angles) for op in ops)


def sequences(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    from te_transform.backends import te

    x, angles = queries(4, tokens // 4), frequencies(4, tokens // 4).repeat(1, 1, 2)
    yield f"4 of {tokens // 4}", *(trained(op, x, angles) for op in (plain.Rotary(), te.Rotary()))


def deepseek(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    from te_transform.backends import te

    x, angles = queries(1, tokens)[..., :64], frequencies(1, tokens)[..., :32]
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    kernel = te.Rotary()

    def written(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def fused(x: Tensor, angles: Tensor) -> Tensor:
        return kernel(torch.cat((x[..., ::2], x[..., 1::2]), -1), angles)

    yield f"{HEADS} heads of 64", *(trained(each, x, angles.repeat(1, 1, 2)) for each in (written, fused))


def products(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    one = torch.ones(1, device="cuda", dtype=torch.float32)
    width, joined, gated, inner = 4096, 6144, 28672, 14336
    weights = ((joined, width), (width, width), (gated, width), (width, inner))
    of_inputs = ((tokens, ins, outs) for outs, ins in weights)
    of_weights = ((*weight, tokens) for weight in weights)
    for rows, columns, summed in (*((tokens, *weight) for weight in weights), *of_inputs, *of_weights):
        a, b = (random(size, summed).detach().to(torch.float8_e4m3fn) for size in (rows, columns))
        arguments = a, b, one, one, None, torch.bfloat16, True
        ways = multiply, cublas.fastest_product
        yield f"{rows} x {columns} x {summed}", *(partial(compute, *arguments) for compute in ways)


OPS = {"router": router, "pairs": pairs, "deepseek": deepseek, "sequences": sequences, "products": products}


def trained(op: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Step:
    """Return a function that runs an op forward and backward."""
    x = x.detach().requires_grad_()
    grad = torch.ones_like(op(x, *others))

    def step() -> None:
        x.grad = None
        op(x, *others).backward(grad)

    return step


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def queries(batch: int, length: int) -> Tensor:
    return random(batch, length, HEADS, WIDTH).transpose(1, 2)


def frequencies(batch: int, length: int) -> Tensor:
    return torch.rand(batch, length, WIDTH // 2, device="cuda") * 60


if __name__ == "__main__":
    main()
