"""What the tests of other packages share: a model, the same one converted, and a training loop.

In float64, where all that fusing may change, the order of sums, stays below any mistake: an optimizer that
divides by a square root, or rounds to bfloat16 inside, answers the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import te_transform
from tests.models.gated import VOCAB, WIDTH, Gated
from tests.zoo import seeded

EXACT = {"rtol": 1e-9, "atol": 1e-11}
IDS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
BATCHES = [(ids, ids.roll(-1, dims=-1)) for ids in (IDS, (IDS + 1) % VOCAB, IDS * 3 % VOCAB)]

LLAMA_IDS = torch.randint(3, VOCAB, (16, 10), generator=torch.Generator().manual_seed(0))

Make = Callable[[], nn.Module]


def original(blocks: int = 1) -> nn.Module:
    """The model, in train mode, the same at every call."""
    return seeded(Gated, blocks).double().train()


def converted() -> nn.Module:
    """The same model, converted."""
    return convert(original())


def convert(model: nn.Module) -> nn.Module:
    """Convert `model` in place: q, k, v are joined, and gate, up; every norm is fused with what reads it."""
    model = te_transform.convert(model, BATCHES[0], inplace=True, verify=False)
    counts = te_transform.report(model).counts
    blocks = len(model.blocks)
    assert [counts["merge_siblings"], counts["layernorm_mlp"]] == [2 * blocks, blocks]
    return model


MODELS: dict[str, Make] = {"original": original, "converted": converted}


def llama(layers: int = 1) -> nn.Module:
    """A Llama of transformers, in float32 and train mode, the same at every call."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return seeded(transformers.LlamaForCausalLM, config).train()


def tokenizer() -> Any:
    """One whose words are the numbers of the ids."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, "0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


def converted_llama(layers: int = 1, **sample: Any) -> nn.Module:
    """The same Llama, converted for a step of training, or for what `sample` calls it with."""
    sample = sample or {"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2]}
    model = te_transform.convert(llama(layers), sample, inplace=True, verify=False)
    counts = te_transform.report(model).counts
    assert [counts["merge_siblings"], counts["layernorm_mlp"]] == [2 * layers, layers]
    return model


def both(act: Callable[[nn.Module], Any], *others: Make, **tolerances: float) -> None:
    """Check that `act` gives the same for the converted model (and the `others`) as for the original."""
    expected = act(original())
    for make in others or (converted,):
        close(act(make()), expected, **tolerances)


def close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Check that two answers of tensors and numbers agree as closely as float64 allows."""
    torch.testing.assert_close(actual, expected, **EXACT | tolerances)


def train(
    model: nn.Module, optimizers: Any, steps: int = 3, backward: Callable[[Tensor], Any] = Tensor.backward
) -> list[float]:
    """The losses of some steps, each on a batch of its own."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    losses = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(*BATCHES[step % len(BATCHES)])
        backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all that the model would save, by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def training_arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    """The arguments of four steps of transformers' Trainer, with a checkpoint after each second one."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,  # no gradient that is all rounding gets a step of full length
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**settings | options)
