"""Lightning trains a converted model like the original, and checkpoints of one load into the other."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.packages import BATCHES, MODELS, close, weights

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("at_any_size")]

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Run(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]


def run(name: str, folder: Path, resume: Path | None = None, **options: Any) -> Run:
    module = Module(MODELS[name]())
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, max_epochs=2, **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return Run(module.losses, weights(module.model))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}], ids=str)
def test_training(options: dict[str, Any], tmp_path: Path) -> None:
    close(run("converted", tmp_path, **options), run("original", tmp_path, **options))


@pytest.mark.parametrize(("saved", "loaded"), [("original", "converted"), ("converted", "original")])
def test_resuming(saved: str, loaded: str, tmp_path: Path) -> None:
    run(saved, tmp_path, max_steps=3)
    resumed = run(loaded, tmp_path, tmp_path / f"{saved}.ckpt")
    whole = run("original", tmp_path)
    close(resumed.losses, whole.losses[3:])
    close(resumed.weights, whole.weights)
