"""The executor of inductor compiles deep graphs layer by layer, and graphs under DDP bucket by bucket."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform
from tests.attacks import Block, Pair
from tests.compilers import Compiler, trace
from tests.conversions import ALL, EVERYWHERE, error, gradients
from tests.executors.helpers import notes
from tests.models.tiny import WIDTH
from tests.zoo import seeded, zero_dropout

compiled_pair = partial(Pair.of, compile=True)


def llama_of(layers: int) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))


def test_equal_layers_of_a_deep_model_are_compiled_once(deep: None, compilations: Compiler) -> None:
    model = seeded(lambda: llama_of(4))
    ids = torch.randint(40, (2, 6))
    inputs = {"input_ids": ids, "labels": ids}
    converted = te_transform.convert(model, inputs, verify=False, compile=True)
    for _ in range(2):
        with torch.no_grad():  # what equal layers have in common is no number of their weights
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand(()))
            converted.load_state_dict(model.state_dict())
        expected, found = (gradients(each, inputs) for each in (model, converted))
        assert error([*found.values()], [*expected.values()]) < EVERYWHERE
    _, layer, _ = (graph for graph, _ in compilations)  # embeddings, a layer, and the loss
    assert [node.op for node in layer.graph.nodes].count("call_module") == 1
    assert not notes(converted, "uncompiled")


def test_modes_with_cuda_graphs_compile_the_whole_graph(deep: None, compilations: Compiler) -> None:
    Pair.of(Layers, compile="reduce-overhead").agree()
    assert len(compilations) == 1


class Layers(nn.Module):
    """Layers that differ: in a number, in a size, in what they are given, in whether they are trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.layers[3].requires_grad_(requires_grad=False)
        self.scales = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x * scale) + (kept[0] if kept else 0)
            kept.append(x)
        return x, kept[1], kept[4]


class Writes(Layers):
    """Its layers write to what others have made."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            total += layer(x)
        return total


class Switches(Layers):
    """A setting holds for some layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            for layer in [*self.layers][1:5]:
                x = layer(x)
        return self.layers[5](x)


class Casts(Layers):
    """torch.autocast is entered by the forward, around some layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float()


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.integration) for kind in (Layers, Casts)), Writes, Switches],
)
def test_pieces_compute_what_the_whole_graph_computes(
    kind: type[nn.Module], deep: None, compilations: Compiler
) -> None:
    pair = compiled_pair(kind)
    for _ in range(3):
        pair.agree()
    assert (len(compilations) > 1) == (kind is Layers)
    assert len(compilations) < 2 * 6, "some layers are equal"
    assert not notes(pair.converted, "uncompiled")


@pytest.mark.integration  # of one model or another the pieces are those of the modules above
@pytest.mark.parametrize(("name", "pieces"), [("gpt2", 3), ("vit", 3)])
def test_pieces_of_one_bucket_compute_what_the_whole_graph_computes(
    name: str, pieces: int, compilations: Compiler, buckets: Callable[[int], None]
) -> None:
    """DDP has buckets. The head of GPT-2 shares the weight of the embedding."""
    case = ALL[name]
    model, inputs = zero_dropout(seeded(case.build)), case.sample()
    buckets(sum(p.nbytes for p in model.parameters()) // 8)
    converted = te_transform.convert(model, inputs, verify=False, compile=True)
    expected, found = (gradients(each, inputs) for each in (model, converted))
    trained = [key for key, grad in expected.items() if grad is not None and grad.norm() > 1e-4]
    assert error([found[key] for key in trained], [expected[key] for key in trained]) < EVERYWHERE
    assert len(compilations) == pieces
    assert not notes(converted, "uncompiled")


class Wide(nn.Module):
    """Its layers are numbered, but none is made of others: activations would be cut off from products."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(kind for _ in range(4) for kind in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_sequence_of_single_operations_is_not_cut(
    compilations: Compiler, buckets: Callable[[int], None]
) -> None:
    buckets(1)
    compiled_pair(Wide).agree()
    assert len(compilations) == 1


def test_a_graph_whose_pieces_fail_to_compile_is_compiled_whole(deep: None, compilations: Compiler) -> None:
    def fails_at_first(*given: Any) -> Any:
        if len(compilations) == 1:
            raise NotImplementedError("no")
        return trace(*given)

    compilations.compile = fails_at_first
    pair = compiled_pair(Layers)
    pair.agree()
    (piece, _), (whole, _) = compilations
    assert len(piece.graph.nodes) < len(whole.graph.nodes)
    assert not notes(pair.converted, "uncompiled")
