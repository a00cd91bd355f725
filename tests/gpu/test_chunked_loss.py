"""Head and loss a part of the vocabulary at a time, on a GPU: as exact, in less memory."""

import copy

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


def step(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], int]:
    """The loss and all gradients, and what a step took of the GPU's memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *found], torch.cuda.max_memory_allocated() - before


def test_is_as_exact_in_less_memory(model: LlamaForCausalLM) -> None:
    ids = torch.randint(WORDS, (2, TOKENS), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    converted = te_transform.convert(model, batch, backend="te", chunked_loss=True)
    te_transform.report(converted).expect(chunked_loss=1)
    wide = copy.deepcopy(model).double()
    (found, less), (own, _) = step(converted, ids), step(model, ids)
    _, most = step(te_transform.convert(model, batch, backend="te", verify=False), ids)
    exact, _ = step(wide, ids)
    for one, original, reference in zip(found, own, exact, strict=True):
        allowed = 1.2 * (original - reference).norm() + torch.finfo(one.dtype).eps * reference.norm()
        assert (one - reference).norm() <= allowed
    logits = 2 * TOKENS * WORDS * 2  # in bf16; their gradient is as large
    assert less <= most - 2 * logits + 8 * chunked_loss.NUMBERS
