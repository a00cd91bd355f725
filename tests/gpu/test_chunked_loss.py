"""Head and loss a part of the vocabulary at a time, on a GPU: as exact, in less memory."""

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
    """What a step takes of the GPU's memory."""
    for _ in range(2):
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
    part = 10 * chunked_loss.NUMBERS  # in bf16, and twice in fp32
    assert less <= most - 2 * logits + part + 2**21  # some numbers a row
    assert te_transform.verify(model, converted, {"input_ids": ids[:, :64], "labels": ids[:, :64]})
