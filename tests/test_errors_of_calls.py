"""A call that the original refuses raises the original's error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from tests.zoo import seeded

WORDS, WIDTH = 20, 16
IDS = torch.arange(6).view(2, 3)


class Words(nn.Module):
    """An embedding, heads of its columns, and a linear; the forward looks at ids, unless it is `blind`."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.linear, self.calls, self.blind = nn.Linear(WIDTH, WIDTH), 0, False

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if not self.blind and -7 in ids[:, [-1, 0]]:  # as transformers looks for padding
            raise ValueError("no such word")
        x = self.norm(self.table(ids))
        heads = x.view(ids.shape[0], -1, 2, WIDTH // 2)
        return self.linear(heads.flatten(2))


BAD = {
    "beyond the table": torch.full((2, 3), WORDS),
    "below the table": torch.full((2, 3), -1),
    "a length of 0": torch.empty(2, 0, dtype=torch.long),
    "no batch": torch.empty(0, 3, dtype=torch.long),
    "no word": torch.full((2, 3), -7),
    "no integers": torch.zeros(2, 3),
}


def raised(model: nn.Module, ids: Tensor) -> type[Exception]:
    with pytest.raises(Exception) as found:  # noqa: PT011
        model(ids)
    return found.type


@pytest.mark.parametrize("compile", [False, True])
def test_the_error_is_the_originals(compile: bool) -> None:
    original = seeded(Words)
    converted = te_transform.convert(original, IDS, compile=compile)
    converted(IDS)
    for name, ids in BAD.items():
        assert raised(converted, ids) is raised(original, ids), name
    torch.testing.assert_close(converted(IDS), original(IDS))


def test_a_call_that_fails_changes_the_model_once_at_most() -> None:
    original = seeded(Words)
    original.blind = True
    converted = te_transform.convert(original, IDS, compile=True)
    for model in (original, converted):
        model.calls = 0
        assert raised(model, BAD["beyond the table"]) is IndexError
        assert model.calls <= 1


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("the error of an error")


class Stop(BaseException): ...


def fails_later(model: Any, error: type[BaseException]) -> None:
    te_transform.convert(model, IDS, inplace=True)
    model.fails = error
    model(IDS)


def fails_at_once(model: Any, error: type[BaseException]) -> None:
    model.fails = error
    try:
        te_transform.convert(model, IDS, inplace=True)
    except te_transform.TraceError as told:
        if told.__cause__ is not None:
            raise told.__cause__ from None


@pytest.mark.parametrize("error", [Unreadable, Stop])
@pytest.mark.parametrize("run", [fails_later, fails_at_once])
def test_any_error_of_user_code_arrives(run: Callable[..., None], error: type[BaseException]) -> None:
    class Fails(Words):
        fails: type[BaseException] | None = None

        def forward(self, ids: Tensor) -> Tensor:
            if self.fails is not None:
                raise self.fails
            return super().forward(ids)

    with pytest.raises(BaseException) as found:  # noqa: PT011
        run(seeded(Fails), error)
    assert found.type is error
