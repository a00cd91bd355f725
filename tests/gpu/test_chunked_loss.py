"""Head and loss a part of the vocabulary at a time, on a GPU: as exact, in less memory."""

import gc

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import te_transform
from te_transform.backends import chunked_loss
from tests.models.llama import shape_of_8b

WORDS, TOKENS = 128256, 1024


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = shape_of_8b(layers=1, vocab_size=WORDS, length=TOKENS)
    config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads = (
        256,
        512,
        4,
        2,
    )
    config.head_dim = 64
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def peak(model: nn.Module, ids: Tensor) -> int:
    """Return the GPU memory that a step allocates."""
    for _ in range(2):
        gc.collect()  # what the capture has left: some of it goes while the step runs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        torch.autograd.grad(loss, list(model.parameters()))
        del loss
    return torch.cuda.max_memory_allocated() - before


def test_is_as_exact_in_less_memory(model: LlamaForCausalLM) -> None:
    ids = torch.randint(WORDS, (2, TOKENS), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    converted = te_transform.convert(model, batch, backend="te", chunked_loss=True)
    te_transform.report(converted).expect(chunked_loss=1)
    less = peak(converted, ids)
    most = peak(te_transform.convert(model, batch, backend="te", verify=False), ids)
    logits = 2 * TOKENS * WORDS * 2  # in bf16; their gradient is as large
    # a part in bf16, and the weight's gradient, which the backward fills part by part
    part = 2 * chunked_loss.NUMBERS + model.lm_head.weight.nbytes
    assert less <= most - 2 * logits + part + 2**22  # some numbers a row, and the input's gradient in fp32
    assert te_transform.verify(model, converted, {"input_ids": ids[:, :64], "labels": ids[:, :64]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 37, 5000])
def test_kernels_compute_what_pytorchs_operations_do(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    logits, column = (4 * torch.randn(12, width)).to(dtype), torch.randint(-2, width + 2, (12,))
    logits[0], logits[1, 0], logits[2, -1] = -torch.inf, torch.inf, torch.nan
    top, total, own, each = torch.randn(4, 12)
    top[[0, 3]] = total[[0, 3]] = -torch.inf  # rows of which nothing is known
    sums = top, total, own
    on_gpu = [held.cuda() for held in sums]
    chunked_loss._gather(logits, column, *sums)
    chunked_loss._gather(logits.cuda(), column.cuda(), *on_gpu)
    for one, other in zip((on_gpu[0] + on_gpu[1], on_gpu[2]), (top + total, own), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5, equal_nan=True)
    found = logits.cuda()
    chunked_loss._to_gradient(found, column.cuda(), *(held.cuda() for held in (top, total, each)))
    chunked_loss._to_gradient(logits, column, top, total, each)
    torch.testing.assert_close(found.cpu(), logits, equal_nan=True)
