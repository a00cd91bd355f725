"""The loss of Hugging Face's causal language models in one kernel, through the door they have for it.

`loss_function` is an attribute of such a model, ForCausalLMLoss where nothing else was set: it casts the
logits to fp32, which makes two more copies of them, and passes over each several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.backends.limits import without_cross_entropy
from te_transform.slots import traced


@dataclass(eq=False)
class CausalLoss:
    """ForCausalLMLoss of transformers 5, its cross entropy computed by TE from the logits as they are."""

    original: Callable[..., Tensor]
    plain_calls: Counter[str] = field(default_factory=Counter)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        """The mean over the tokens, or their sum by `num_items_in_batch`, in fp32.

        logits [batch, length, vocabulary], bf16; labels [batch, length], or shift_labels, moved already.
        """
        targets = labels if shift_labels is None else shift_labels
        if traced() or not self._takes(logits, targets, vocab_size):
            return self.original(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **rest
            )
        if shift_labels is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        return _cross_entropy(logits, targets, num_items_in_batch, ignore_index)

    def _takes(self, logits: Tensor, targets: Tensor, vocab_size: int) -> bool:
        why = without_cross_entropy(logits, targets)
        if why is None and logits.shape[-1] != vocab_size:
            why = "logits of another width than the vocabulary"
        self.plain_calls.update([f"the loss, {why}"] if why else [])
        return why is None


def _cross_entropy(logits: Tensor, targets: Tensor, items: Tensor | int | None, ignore_index: int) -> Tensor:
    from te_transform.backends import te

    counted = targets != ignore_index
    # the kernel would read past the logits: an assertion as PyTorch has one, which waits for nothing
    torch._assert_async((~counted | ((targets >= 0) & (targets < logits.shape[-1]))).all())
    total = te.cross_entropy(logits, targets, ignore_index).sum()
    if items is None:
        return total / counted.sum()
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def fusable(model: nn.Module) -> bool:
    """Whether the model computes its loss by transformers' own function for causal models."""
    function = getattr(model, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    return function is ForCausalLMLoss and "_loss_function" not in vars(model)
