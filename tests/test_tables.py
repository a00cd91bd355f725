"""Invented inputs have no more tokens than a model has positions for, and no ids beyond its tables."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import te_transform
from te_transform.command_line.main import main
from te_transform.graph.inputs import invent
from tests.models.tables import Reads


class Offset(Reads):
    def places(self, ids: Tensor) -> Tensor:
        return self.positions(torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + 2)


class Counted(Reads):
    """Positions that are counted without padding, as in RoBERTa."""

    def places(self, ids: Tensor) -> Tensor:
        return self.positions((ids != 99).long().cumsum(1) + 1)


class Buffered(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(64)[None], persistent=False)

    def places(self, ids: Tensor) -> Tensor:
        return self.positions(self.numbers[:, : ids.shape[1]])


class Indexed(Reads):
    def places(self, ids: Tensor) -> Tensor:
        return self.positions.weight[torch.arange(ids.shape[1], device=ids.device)]


class Sliced(Reads):
    def places(self, ids: Tensor) -> Tensor:
        return self.positions.weight[: ids.shape[1]]


class Own(Reads):
    """A parameter is the table, as in nn.Parameter(torch.zeros(1, 64, 16))."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.table = nn.Identity(), nn.Parameter(torch.zeros(1, 5, 16))

    def places(self, ids: Tensor) -> Tensor:
        return self.table[:, : ids.shape[1]]


class Asserts(Reads):
    rows = 64

    def places(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] <= 4, "cannot forward more than 4 tokens"
        return super().places(ids)


class Types(Reads):
    """The smallest table is of types, which no position is looked up in."""

    rows = 64
    words = 50

    def __init__(self) -> None:
        super().__init__()
        self.types = nn.Embedding(2, 16)

    def places(self, ids: Tensor) -> Tensor:
        return super().places(ids) + self.types(torch.zeros_like(ids))


LENGTHS: dict[type[Reads], int] = {
    Reads: 5, Offset: 3, Counted: 3, Indexed: 5, Sliced: 5, Own: 4, Asserts: 4, Types: 8,
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", LENGTHS, ids=lambda kind: kind.__name__)
def test_tokens_and_ids_lie_in_the_tables(kind: type[Reads], device: str) -> None:
    with torch.device(device):
        model = kind()
    (ids,) = invent(model).args
    assert 0 < ids.shape[1] <= LENGTHS[kind]
    assert ids.shape[1] * 2 > LENGTHS[kind]
    with torch.device("cpu"):
        real = kind()
    real(invent(real).args[0])
    assert te_transform.inspect(model).counts["linear"] == 1


def test_positions_of_a_buffer_lie_in_the_table() -> None:
    model = Buffered()
    (ids,) = invent(model).args
    assert ids.shape == (2, 5)
    model(ids)


CONFIGS: dict[str, Callable[[], nn.Module]] = {
    "fewer positions than tokens": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_positions=3, n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    ),
    "rotary positions": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(max_position_embeddings=4, **LLAMA)
    ),
    "positions behind the padding": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(max_position_embeddings=6, **LLAMA)
    ),
    "fewer embeddings than the config has words": lambda: shrunk(10),
    "more embeddings than the config has words": lambda: shrunk(40),
}
LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 20,
}  # fmt: skip


def shrunk(rows: int) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.model.embed_tokens = nn.Embedding(rows, 16)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_inputs_of_a_model_of_transformers_lie_in_its_tables(name: str) -> None:
    model = CONFIGS[name]().eval()
    inputs = invent(model)
    ids = inputs.kwargs["input_ids"]
    model(ids)
    assert ids.max() < 20
    assert ids.shape[1] <= getattr(model.config, "max_position_embeddings", 8)
    assert te_transform.inspect(model).fused


class Fails(Types):
    """Fails on fake tensors, of whatever number, as products by groups do in float32."""

    def places(self, ids: Tensor) -> Tensor:
        if isinstance(ids, FakeTensor):
            raise RuntimeError("expected bfloat16")
        return super().places(ids)


@pytest.mark.parametrize("exactly", [False, True])
def test_a_failure_that_the_number_of_tokens_does_not_change_is_left_to_the_caller(exactly: bool) -> None:
    (ids,) = invent(Fails(), exactly=exactly).args
    assert ids.shape == (2, 8)


FACTORY = """
from tests.models.tables import Reads

class Short(Reads):
    rows = 64
    words = 50
"""


@pytest.fixture
def short(working_folder: Path) -> str:
    (working_folder / "short_of_mine.py").write_text(FACTORY)
    return "short_of_mine:Short"


def test_the_command_line_takes_what_a_factory_has_positions_for(
    short: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", short]) == 0
    assert "(int64[2, 64])" in capsys.readouterr().out
    assert main(["inspect", short, "--length", "65"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "expected at most as many tokens as Short has positions for, got 65 (IndexError: " in told
