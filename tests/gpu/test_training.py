"""Training and serving in FP8 on Transformer Engine: steps, accumulation, checkpointing, kept weights."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_transform
from te_transform.backends import limits
from te_transform.backends.fp8.registry import state_of
from tests.conversions import same_bits
from tests.gpu.llama import batch, converted, distance, gradients, llama, step
from tests.zoo import seeded

RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")


def kernels(model: nn.Module, in_fp8: bool = True) -> list[Any]:
    """Return the FP8 state of the products that have run in FP8, in the order of their first parameters."""
    found = [kernel for parameter in model.parameters() for kernel in state_of(parameter).kernels.values()]
    return [kernel for kernel in found if kernel.in_fp8] if in_fp8 else found


# Steps


def test_the_first_step_of_delayed_scaling_is_as_good_as_the_hundredth() -> None:
    model = seeded(llama)
    loss, exact = step(copy.deepcopy(model).float(), batch())
    fused = converted("fp8-delayed", model)
    errors = []
    for _ in range(100):  # the same weights and tokens: only the scales change
        now, found = step(fused, batch())
        errors.append(distance(found, exact))
    assert abs(now - loss) < 0.01 * loss
    assert errors[0] <= 1.05 * errors[-1]


def test_the_first_step_is_worse_without_scales() -> None:
    """Without first scales, the error is larger: otherwise the test above would prove nothing."""
    model = seeded(llama)
    small = 2**-14  # a loss like the mean over a large batch
    _, exact = step(copy.deepcopy(model).float(), batch(), small)
    fused = converted("fp8-delayed", model)
    step(fused, batch(), small)
    for kernel in kernels(fused):
        for direction in ("scaling_fwd", "scaling_bwd"):
            kernel.module.fp8_meta[direction].scale.fill_(1)
            kernel.module.fp8_meta[direction].amax_history.zero_()
    errors = [distance(step(fused, batch(), small)[1], exact) for _ in range(6)]
    assert errors[0] > 1.5 * errors[-1]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_in_float32_run_in_fp8_under_autocast(recipe: str, compile: bool) -> None:
    model = seeded(llama)
    wide = copy.deepcopy(model).float()
    _, exact = step(copy.deepcopy(wide), batch())
    errors = []
    for one in (model, wide):
        fused = converted(recipe, one, compile=compile)
        for _ in range(3):
            fused.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=one is wide):
                loss = fused(**batch()).loss
            loss.backward()
        errors.append(distance(gradients(fused), exact))
        assert len(kernels(fused)) == 4 * 3  # of each layer: q, k and v, o, the MLP
    assert errors[1] <= 1.1 * errors[0]
    if not compile:
        with torch.autocast("cuda", torch.bfloat16):
            assert te_transform.verify(wide, fused, batch())


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_trains_like_the_original(recipe: str | None) -> None:
    model = seeded(llama)
    fused = converted(recipe, model)
    losses = []
    for one in (model.train(), fused):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        for number in range(20):
            loss = one(**batch(number % 4)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    start = step(seeded(llama), batch())[0].item()
    assert losses[0] < 0.1 * start  # it knows the four batches by heart
    assert start - losses[1] > 0.97 * (start - losses[0]), losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_taken_in_training_is_bitwise_the_weights(recipe: str) -> None:
    fused = converted(recipe)
    optimizer = torch.optim.AdamW(fused.parameters(), lr=1e-3)
    for number in range(3):
        fused(**batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    assert list(state) == list(llama().state_dict())
    fresh = seeded(llama)
    fresh.load_state_dict(state)
    assert same_bits(fresh.state_dict(), state)
    again = converted(recipe)
    again.load_state_dict(state)
    assert same_bits(again.state_dict(), state)
    assert same_bits(te_transform.revert(fused).state_dict(), state)


# Token counts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (2, 16)])
def test_any_number_of_tokens(recipe: str, shape: tuple[int, int]) -> None:
    model = seeded(llama)
    fused, inputs = converted(recipe, model), batch(1, *shape)
    exact_loss, exact = step(copy.deepcopy(model).float(), inputs) if shape != (1, 1) else (None, None)
    if exact is None:  # one token has no next one, and no loss
        with torch.no_grad():
            expected, actual = (m(inputs["input_ids"]).logits.float() for m in (model, fused))
        assert (actual - expected).norm() < 0.2 * expected.norm()
        return
    loss, found = step(fused, inputs)
    full = distance(step(fused, batch(1, 4, 64))[1], step(copy.deepcopy(model).float(), batch(1, 4, 64))[1])
    assert abs(loss - exact_loss) < 0.02 * exact_loss
    assert distance(found, exact) < 2 * full


# Accumulation


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_accumulates_what_autograd_would(recipe: str | None) -> None:
    fused = converted(recipe, seeded(llama).to(torch.bfloat16))
    exact = copy.deepcopy(seeded(llama)).float().train()
    for number in range(4):
        (exact(**batch(number)).loss / 4).backward()
    reference = gradients(exact)
    for number in range(4):
        (fused(**batch(number)).loss / 4).backward()
    alone = gradients(fused)
    fused.zero_grad()
    with te_transform.accumulate(fused, steps=4) as accumulation:
        for number in range(4):
            (fused(**batch(number)).loss / 4).backward()
    together = gradients(fused)
    assert accumulation.taken == 4
    assert {*accumulation.fused, *accumulation.left_out} == {name for name, _ in fused.named_parameters()}
    assert "model.layers.0.mlp.gate_proj.weight" in accumulation.fused
    assert distance(together, reference) <= 1.05 * distance(alone, reference)
    assert not any("main_grad" in vars(parameter) for parameter in fused.parameters())


def test_forwards_before_backwards_accumulate_too() -> None:
    fused = converted("fp8-current")
    with te_transform.accumulate(fused, steps=2):
        for number in range(2):
            (fused(**batch(number)).loss / 2).backward()
    one_by_one = gradients(fused)
    fused.zero_grad()
    with te_transform.accumulate(fused, steps=2):
        sum(fused(**batch(number)).loss / 2 for number in range(2)).backward()
    assert distance(gradients(fused), one_by_one) < 1e-2


def test_weights_are_quantized_once_in_an_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.module import layernorm_linear, layernorm_mlp, linear

    fused, calls = converted("fp8-current"), []
    step(fused, batch())

    def counted(original: Callable) -> Callable:
        def quantize_weight(**options: Any) -> Any:
            made = original(**options)
            calls.append(made[1] is not None or options.get("workspace") is None)
            return made

        return quantize_weight

    for module in (linear, layernorm_linear, layernorm_mlp):
        monkeypatch.setattr(module, "quantize_weight", counted(module.quantize_weight))
    with te_transform.accumulate(fused, steps=3):
        for number in range(3):
            (fused(**batch(number)).loss / 3).backward()
    weights = sum(len(kernel.weights) for kernel in kernels(fused))
    assert sum(calls) == weights
    assert len(calls) == 3 * weights


@pytest.mark.parametrize("recipe", [None, "fp8-current"])
def test_small_calls_accumulate_in_the_buffers_too(
    recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a call gains: plain PyTorch would sum up in the weights' dtype."""
    exact = seeded(llama).float().train()
    for number in range(3):
        exact(**batch(number)).loss.backward()
    errors = []
    for small in (False, True):
        if small:
            monkeypatch.setattr(limits.ignore_size_limits, "entered", 0)  # as outside of these tests
        fused = converted(recipe)
        with te_transform.accumulate(fused, steps=3):
            for number in range(3):
                fused(**batch(number)).loss.backward()
        assert not any(why.startswith("a call too small") for why in te_transform.report(fused).plain_calls)
        errors.append(distance(gradients(fused), gradients(exact)))
    # other kernels for attention and angles, which are no part of it: they round elsewhere, not more
    assert errors[1] <= 1.2 * errors[0]


def test_accumulation_says_what_is_wrong() -> None:
    fused = converted(None)
    with te_transform.accumulate(fused, steps=1):
        fused(**batch(0)).loss.backward()
        with pytest.raises(te_transform.AccumulationError, match=r"in accumulate\(steps=.*\), got 2;"):
            fused(**batch(1))
        inner = te_transform.accumulate(fused, steps=1)
        with pytest.raises(
            te_transform.AccumulationError, match=r"one accumulate\(\) of this model at a time"
        ):
            inner.__enter__()
    assert all(state_of(parameter).gradients is None for parameter in fused.parameters())


# Activation checkpointing


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_activation_checkpointing_is_as_exact(recipe: str | None, reentrant: bool, compile: bool) -> None:
    """As the original is, in a recipe as without checkpoints: the blocks are captured one by one, what lies
    between them rounds elsewhere."""
    model, checkpointed = seeded(llama), converted(recipe, compile=compile)
    exact, other = copy.deepcopy(model).float(), model if recipe is None else converted(recipe)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for number in range(3):
        _, expected = step(exact, batch(number))
        loss, own = step(other, batch(number))
        again, found = step(checkpointed, batch(number))
        assert abs(loss - again) <= 1e-2 * loss
        assert distance(found, expected) <= 1.1 * distance(own, expected)
    assert bool(kernels(checkpointed)) == (recipe is not None)


def test_code_before_blocks_does_not_wait_for_the_gpu() -> None:
    """transformers asks whether positions are packed, in each forward whose positions are not given."""
    model, checkpointed = seeded(llama), converted(None)
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(3):
        checkpointed(**inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        checkpointed(**inputs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            model(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Serving


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_weights_give_the_same_numbers_until_a_weight_changes(recipe: str) -> None:
    fused, ids = converted(recipe).eval(), batch()["input_ids"]
    with torch.no_grad():
        first, second = fused(ids).logits, fused(ids).logits
        assert torch.equal(first, second)
        assert all(kernel.module._fp8_workspaces for kernel in kernels(fused))
        fused.model.layers[1].mlp.down_proj.weight.mul_(2)
        changed = fused(ids).logits
        fresh = converted(recipe, seeded(llama)).eval()
        fresh.model.layers[1].mlp.down_proj.weight.mul_(2)
        expected = fresh(ids).logits
    assert (changed - first).norm() > 0.01 * first.norm()
    if recipe != "fp8-delayed":  # whose scales are of the weights before
        assert torch.equal(changed, expected)
    fused.train()(**batch())
    assert not any(kernel.module._fp8_workspaces for kernel in kernels(fused))


def test_generates_in_bf16_as_exactly_as_the_original() -> None:
    model = seeded(llama)
    fused, ids = converted(None, model).eval(), batch(5, 2, 9)["input_ids"]
    exact = copy.deepcopy(model).double().eval()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for padding in (None, mask):
        options = {"attention_mask": padding, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        scores = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
        with torch.no_grad():
            own, theirs = (m.eval().generate(ids, **options, **scores) for m in (fused, model))
            reference = exact.generate(ids, **options, **scores)
        steps = 1 + int((own.sequences == theirs.sequences).all(0)[9:].long().cumprod(0).sum())
        for found, original, wide in list(zip(own.logits, theirs.logits, reference.logits, strict=True))[
            :steps
        ]:
            allowed = 1.2 * (original.double() - wide.double()).norm() + 2**-8 * wide.double().norm()
            assert (found.double() - wide.double()).norm() <= allowed


# Without a recipe


def test_the_users_own_autocast_is_heard() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    model = seeded(llama)
    fused, ids = converted(None, model).eval(), batch(0, 1, 7)["input_ids"]
    with torch.no_grad():
        plain = fused(ids).logits.float()
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            quantized = fused(ids).logits.float()
        expected = converted("fp8-current", model).eval()(ids).logits.float()
    assert (quantized - plain).norm() > 2**-8 * plain.norm()
    assert (quantized - plain).norm() < 2 * (expected - plain).norm()


# Copies


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_copies_go_on_by_themselves(recipe: str | None) -> None:
    model = seeded(llama)
    fused = converted(recipe, model)
    step(fused, batch())
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    _, exact = step(copy.deepcopy(model).float(), batch(1))
    own, *others = [distance(step(one, batch(1))[1], exact) for one in (fused, *copies)]
    assert all(other <= 1.1 * own for other in others), (own, others)
    for again in copies if recipe == "fp8-delayed" else ():
        for number in (2, 3):
            step(again, batch(number))
        state = kernels(again)[0].module.fp8_meta["scaling_fwd"]
        before = state.amax_history.clone()
        step(again, batch(4))
        assert not torch.equal(before, state.amax_history)


def test_weights_moved_to_the_cpu_run_in_plain_pytorch() -> None:
    model = seeded(llama)
    fused = converted("fp8-current", model).eval().cpu()
    exact, ids = copy.deepcopy(model).double().cpu().eval(), batch()["input_ids"].cpu()
    with torch.no_grad():
        wide, original, found = (m(ids).logits.double() for m in (exact, model.cpu().eval(), fused))
    assert (found - wide).norm() <= 1.2 * (original - wide).norm() + 2**-8 * wide.norm()
    assert te_transform.report(fused).plain_calls["an input on cpu"]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_moved_to_the_gpu_after_its_conversion_trains_in_te(autocast: bool) -> None:
    """Trainer and accelerate move models to the GPU later. Weights in float32 are then for autocast."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = seeded(lambda: llama(2048, layers=1)).to("cpu", dtype)
    fused = te_transform.convert(model, {name: ids.cpu() for name, ids in batch().items()})
    assert "the model is not on the GPU" in te_transform.report(fused).notes[0]
    _, exact = step(copy.deepcopy(model).to("cuda", torch.float32), batch())
    errors = []
    for one in (model, fused):
        one.cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            _, found = step(one, batch())
        errors.append(distance(found, exact))
    assert errors[1] <= 1.1 * errors[0]
    told = te_transform.report(fused)
    assert told.notes[0] == "backend 'te', because it runs here and the model is on the GPU"
    told.expect(layernorm_mlp=1, attention=1)
    # weights in float32 are cast by PyTorch, TE's modules take them in a recipe alone
    assert any(kernel.built is not None for kernel in kernels(fused, in_fp8=False)) is not autocast


# Frozen parts


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("trained", ["", "mlp", "self_attn", "norm", "lm_head"])
def test_any_part_may_be_frozen(recipe: str | None, trained: str) -> None:
    """With gradients on all the same: nothing needs one, or parts of layers do whose input needs none."""
    model = seeded(llama)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(trained) and trained in name)
    whole, part = converted(recipe, seeded(llama)), converted(recipe, model)
    loss, expected = step(whole, batch())
    found = part(**batch()).loss
    assert torch.equal(found.detach(), loss)
    if trained:
        found.backward()
    names = {name for name, _ in model.named_parameters() if trained and trained in name}
    gradient = gradients(part)
    assert gradient.keys() == names
    if trained:  # kernels of attention's backward add up in no fixed order
        assert distance(gradient, {name: expected[name] for name in names}) < 1e-2
