"""Calls in which nothing gains run captured or as the user's own code, by the clock of the GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.execution.trials import CALLS_UNTIL_NEXT, IN_A_ROW, OWN_IS_FASTER, ROUNDS

pytestmark = pytest.mark.usefixtures("by_size")


@pytest.mark.parametrize("backend", ["te", "torch"])
def test_both_ways_compute_the_same_until_one_is_chosen(backend: str) -> None:
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    original = ViTForImageClassification(config).to("cuda", torch.bfloat16)
    batch = {
        "pixel_values": torch.randn(2, 3, 224, 224, device="cuda", dtype=torch.bfloat16),
        "labels": torch.randint(2, (2,), device="cuda"),
    }
    model = te_transform.convert(copy.deepcopy(original), batch, backend=backend, verify=False)
    losses = []
    for _ in range(IN_A_ROW * ROUNDS + 5):
        losses.append(model(**batch).loss)
        losses[-1].backward()
    assert all(torch.equal(loss, original(**batch).loss) for loss in losses)
    (trial,) = (trial for trial in runner_of(model).user_code.trials.trials.values() if trial.left)
    assert CALLS_UNTIL_NEXT - 5 <= trial.left < CALLS_UNTIL_NEXT
    assert (OWN_IS_FASTER in te_transform.report(model).plain_calls) is trial.own
