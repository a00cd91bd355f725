"""Integers that the CPU knows: the user's code before blocks does not wait for a GPU.

Tensors of the device "meta" have no memory, so only the CPU can answer questions about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.masking_utils import find_packed_sequence_indices

import te_transform
from te_transform.execution import known_integers as file
from te_transform.execution.known_integers import KnownIntegers, Questions

META = {"device": "meta"}


def positions(length: int = 6) -> Tensor:
    return (torch.arange(length, **META) + 0).unsqueeze(0)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda: find_packed_sequence_indices(positions().expand(3, -1)) is None, True),
        (lambda: bool((positions()[:, -1] == 5).all()), True),
        (lambda: int(positions()[0, 3]), 3),
        (lambda: positions().view(1, 1, -1).expand(4, 2, -1)[3, 1].tolist(), [0, 1, 2, 3, 4, 5]),
        (lambda: [0, 7, 9][positions()[0, 1]], 7),
        (lambda: torch.arange(2, 11, 3, **META).tolist(), [2, 5, 8]),
        (lambda: torch.ones(2, 3, dtype=torch.bool, **META).sum().item(), 6),
        (lambda: torch.equal(torch.zeros(2, dtype=torch.int, **META), torch.full((2,), 0, **META)), True),
        (lambda: bool(((positions() > 1) & ~(positions() < 4)).any()), True),
        (lambda: (7 - positions()[0, 2:4]).tolist(), [5, 4]),
    ],
)
def test_the_cpu_answers(question: Callable[[], Any], answer: Any) -> None:
    with KnownIntegers():
        assert question() == answer


def with_other_rows(known: Tensor) -> Tensor:
    return torch.add(known, torch.empty(1, 6, dtype=torch.long, **META))


def written(known: Tensor) -> Tensor:
    known[0] += 1
    return known


def written_by_another_name(known: Tensor) -> Tensor:
    known.data.add_(1)
    return known


def written_outside(known: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        known[0].add_(1)
    return known


@pytest.mark.parametrize(
    "change",
    [
        with_other_rows,
        written,
        written_by_another_name,
        written_outside,
        lambda known: known.float(),
        lambda known: torch.empty_like(known),
        lambda known: known.expand(file.MAX_ELEMENTS, -1),
        lambda known: known.set_(torch.empty(1, 6, dtype=torch.long, **META)),
        lambda known: torch.arange(6, out=known[0]),
    ],
)
def test_unknown_values_are_read_from_the_device(change: Callable[[Tensor], Tensor]) -> None:
    with KnownIntegers():
        found = change(positions())
        with pytest.raises(RuntimeError, match="meta"):
            bool(found.sum())


def test_a_known_tensor_can_be_swapped() -> None:
    with KnownIntegers() as mode:
        known, other = torch.arange(6, **META), torch.empty(6, dtype=torch.long, **META)
        torch.utils.swap_tensors(known, other)  # which refuses tensors with weak references
        for swapped in (known, other):
            with pytest.raises(RuntimeError, match="meta"):
                bool(swapped.sum())
    assert not mode.known


def test_only_plain_calls_on_a_gpu_are_watched() -> None:
    def is_watched(x: Tensor) -> bool:
        return isinstance(Questions().answered(nn.Identity(), (3, x), {}), KnownIntegers)

    on_gpu, seen = torch.ones(2, **META), []
    assert is_watched(on_gpu)
    assert not is_watched(torch.ones(2))
    torch.func.vmap(lambda x: seen.append(is_watched(x)) or x)(on_gpu)
    assert seen == [False]
    with FakeTensorMode():
        assert not is_watched(on_gpu)
    with Questions().answered(nn.Identity(), (on_gpu,), {}):
        assert not is_watched(on_gpu)


def test_a_later_call_is_watched_until_its_last_question() -> None:
    questions, module, on_gpu = Questions(), nn.Identity(), torch.ones(2, **META)

    def asked(number: int, **kwargs: Any) -> int | None:
        """Ask so many questions, and one more. Return the number of answers, or None if nobody answers."""
        with questions.answered(module, (on_gpu,), kwargs) as mode:
            for _ in range(number):
                assert positions().sum().item() == 15
            if mode is None:
                return None
            return mode.answers if isinstance(positions().sum(), Tensor) else 0

    with pytest.raises(ValueError, match="of the user"), questions.answered(module, (on_gpu,), {}):
        raise ValueError("of the user")
    assert asked(2) == 2
    with questions.answered(module, (on_gpu,), {}):
        assert [positions().sum().item() for _ in range(2)] == [15, 15]
        with pytest.raises(RuntimeError, match="meta"):
            positions().sum().item()
    assert asked(0, mask=on_gpu) == 0
    assert asked(0, mask=on_gpu) is None
    assert asked(2, mask=None) == 2


def test_a_compiled_function_of_the_user_is_one_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def counted(x: Tensor) -> Tensor:
        return torch.arange(4) + x

    with KnownIntegers():
        assert counted(torch.ones(4)).tolist() == [1, 2, 3, 4]


def test_code_before_checkpointed_blocks_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = dict.fromkeys(["input_ids", "labels"], torch.arange(24).view(2, 12))
    expected, seen = model(**inputs).loss, []
    converted = te_transform.convert(model, inputs, verify=False)
    converted(**inputs)

    def noted(position_ids: Tensor) -> Tensor | None:
        seen.append(_get_current_function_mode())
        return find_packed_sequence_indices(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", noted)
    monkeypatch.setattr(file, "is_on_gpu", lambda tensor: True)
    loss = converted(**inputs).loss
    assert [type(mode) for mode in seen] == [KnownIntegers]
    assert _get_current_function_mode() is None
    loss.backward()
    torch.testing.assert_close(loss, expected)
