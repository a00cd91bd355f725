"""Captured graphs compiled by inductor on a GPU, alone and in CUDA graphs, in bf16."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import te_transform
from tests.conversions import run
from tests.gpu.zoo import error, gradients, hold_in_fp8, model_of, overwrite_free_memory, sample
from tests.zoo import Inputs, tensors

LENGTH = 512


@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
@pytest.mark.parametrize("name", ["llama", "bert", "nanogpt_manual"])
def test_is_as_exact_as_the_original(name: str, mode: bool | str) -> None:
    model, inputs = model_of(name), sample(name)
    converted = te_transform.convert(model, inputs, backend="te", compile=mode)
    wide, wide_inputs = (
        copy.deepcopy(model).double(),
        {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()},
    )
    for each in range(3):  # CUDA graphs are warmed up, recorded, replayed
        # the next replay of a CUDA graph overwrites what this one returned
        found = [*(out.clone() for out in run(converted, inputs)), *gradients(converted, inputs)]
        own = [*run(model, inputs), *gradients(model, inputs)]
        exact = [*run(wide, wide_inputs), *gradients(wide, wide_inputs)]
        assert error(found, exact) <= 1.1 * error(own, exact), each
    assert not any("uncompiled" in note for note in te_transform.report(converted).notes)


def test_attention_runs_in_cudnns_kernels() -> None:
    model, inputs = model_of("llama"), sample("llama", seq=LENGTH)
    converted = te_transform.convert(model, inputs, backend="te", verify=False, compile=True)
    gradients(converted, inputs)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        gradients(converted, inputs)
    kernels = [event.name for event in profiled.events() if "sdpa" in event.name and "cudnn" in event.name]
    assert any("fprop" in name for name in kernels)
    assert any("bprop" in name for name in kernels)


@pytest.mark.parametrize("length", [128, 100])
def test_attention_in_cuda_graphs(length: int) -> None:
    model, inputs = model_of("llama"), sample("llama", seq=length)
    converted = te_transform.convert(model, inputs, backend="te", verify=False)
    expected = gradients(converted, inputs)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as PyTorch asks for before a capture
        for _ in range(3):
            backward(converted, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    converted.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        backward(converted, inputs)
    found = [parameter.grad for parameter in converted.parameters()]
    for _ in range(2):
        torch.cuda.synchronize()
        overwrite_free_memory()
        graph.replay()
        assert error(found, [grad.double() for grad in expected]) <= 0.05 * error(
            [torch.zeros_like(grad) for grad in expected], [grad.double() for grad in expected]
        )


def backward(model: nn.Module, inputs: Inputs) -> None:
    outputs = [output for output in tensors(model.train()(**inputs)) if output.requires_grad]
    sum(output.double().square().sum() for output in outputs).backward()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_is_as_exact_as_uncompiled_in_fp8(name: str, mode: bool | str, recipe: str) -> None:
    hold_in_fp8(name, recipe, compile=mode)
