"""Weights in FP8 alone: which they are, and what a model shows of them, with a stand-in for TE's tensors."""

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import fp8_weights
from te_transform.originals import original_parameters
from te_transform.weights import is_quantised
from tests.conversions import ALL, same_bits
from tests.stand_in import Te
from tests.test_autocast import quantised, recipes, te

__all__ = ["recipes", "te"]  # fixtures
pytestmark = pytest.mark.usefixtures("recipes")

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(x: Tensor) -> Tensor:
    return x.detach().to(torch.float8_e4m3fn).to(x.dtype)


class Held(Tensor):
    """As TE's QuantizedTensor: it has the shape and the dtype of a weight, and holds fewer bits of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _quantizer = None

    def detach(self) -> Tensor:
        return Tensor.detach(self).as_subclass(Held)

    def dequantize(self) -> Tensor:
        return Tensor.clone(self)

    def copy_(self, source: Tensor) -> Tensor:
        return Tensor.copy_(self, rounded(source))


@pytest.fixture(autouse=True)
def _held(monkeypatch: pytest.MonkeyPatch, te: Te) -> None:
    def quantised(fused: nn.Module, name: str, recipe: object) -> nn.Parameter:
        return nn.Parameter(rounded(getattr(fused, name)).as_subclass(Held), requires_grad=False)

    monkeypatch.setattr(te, "quantised", quantised, raising=False)
    monkeypatch.setattr(fp8_weights, "_on_gpu", lambda weight: True)


def model_and_converted() -> tuple[nn.Module, nn.Module]:
    model = ALL["llama"].build().to(torch.bfloat16)
    return model, quantised(model).requires_grad_(False)


def expected(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {k: rounded(v) if any(name in k for name in NAMES) else v for k, v in state.items()}


def test_holds_what_runs_in_fp8_and_says_why_not_the_rest() -> None:
    model, converted = model_and_converted()
    found = te_transform.quantize_weights(converted)
    assert {name.split(".")[-2] for name in found.names} == {*NAMES}
    assert {*found.names, *found.left_out} == {*original_parameters(model)}
    assert found.left_out["lm_head.weight"] == (
        "its product does not run in FP8, the report of the conversion says why"
    )
    assert found.left_out["model.embed_tokens.weight"] == "no fused product reads it"
    assert not te_transform.quantize_weights(converted).left_out.keys() & {*found.names}


def test_trained_weights_stay_as_they_are() -> None:
    model = ALL["llama"].build().to(torch.bfloat16)
    converted = quantised(model)
    converted.model.layers[0].requires_grad_(False)
    found = te_transform.quantize_weights(converted)
    assert {name.split(".")[2] for name in found.names} == {"0"}
    assert "requires_grad_(False) freezes it" in found.left_out["model.layers.1.mlp.down_proj.weight"]
    held = {o.held for name, o in original_parameters(converted).items() if name not in found.names}
    assert not any(is_quantised(parameter) for parameter in held)


def test_state_dict_has_the_dequantised_values_under_the_old_names() -> None:
    model, converted = model_and_converted()
    te_transform.quantize_weights(converted)
    state = converted.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(type(tensor) is Tensor for tensor in state.values())
    assert same_bits(state, expected(model))
    assert all(type(tensor) is Tensor for tensor in converted.model.layers[0].mlp.state_dict().values())


def test_load_state_dict_quantises() -> None:
    model, converted = model_and_converted()
    te_transform.quantize_weights(converted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    converted.load_state_dict(model.state_dict())
    assert same_bits(converted.state_dict(), expected(model))


def test_computes_with_them() -> None:
    model, converted = model_and_converted()
    te_transform.quantize_weights(converted)
    model.load_state_dict(expected(model))
    inputs = ALL["llama"].sample()
    assert torch.equal(converted(**inputs).logits, quantised(model)(**inputs).logits)


def test_revert_gives_plain_parameters_with_these_values() -> None:
    model, converted = model_and_converted()
    te_transform.quantize_weights(converted)
    te_transform.revert(converted)
    assert all(type(parameter) is nn.Parameter for parameter in converted.parameters())
    assert same_bits(converted.state_dict(), expected(model))
    assert not any(module._state_dict_hooks for module in converted.modules())


def test_a_weight_that_another_module_has_too_stays() -> None:
    model = ALL["llama"].build().to(torch.bfloat16)
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    converted = quantised(model).requires_grad_(False)
    found = te_transform.quantize_weights(converted)
    assert found.left_out["model.layers.0.mlp.down_proj.weight"] == (
        "another module has it too, which would keep it as it is: untie it"
    )


def test_a_weight_that_is_not_on_the_gpu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, converted = model_and_converted()
    monkeypatch.setattr(fp8_weights, "_on_gpu", lambda weight: weight.is_cuda)
    found = te_transform.quantize_weights(converted)
    assert not found.names
    assert found.left_out["model.layers.0.mlp.down_proj.weight"] == (
        "it is not on the GPU, TE has no kernel for it there: move the model first"
    )


def test_needs_a_model_in_fp8() -> None:
    with pytest.raises(te_transform.QuantizationError, match=r"convert\(model, recipe="):
        te_transform.quantize_weights(ALL["llama"].build())


def test_needs_a_te_that_can(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    _, converted = model_and_converted()
    monkeypatch.setattr(te, "HOLDS_FP8", False)
    with pytest.raises(te_transform.QuantizationError, match="a later one is needed"):
        te_transform.quantize_weights(converted)
    assert not any(map(is_quantised, converted.parameters()))
