"""TRL's SFTTrainer, which calls the backbone for itself, trains a converted model like the original."""

from pathlib import Path
from typing import Any

import pytest

from tests.packages import LLAMA_IDS, Make, close, converted_llama, llama, tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("at_any_size")]

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def losses(make: Make, folder: Path, **options: Any) -> list[float]:
    settings = {
        "output_dir": str(folder), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "adam_epsilon": 1e-4, "use_cpu": True, "bf16": False, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    model = make()
    trainer = trl.SFTTrainer(
        model, args=trl.SFTConfig(**settings | options), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"input_ids": LLAMA_IDS.tolist()}),
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history
    return [line[key] for line in logged for key in ("loss", "grad_norm") if key in line]


OPTIONS: list[dict[str, Any]] = [{}, {"loss_type": "chunked_nll"}, {"gradient_checkpointing": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training(options: dict[str, Any], tmp_path: Path) -> None:
    found = losses(converted_llama, tmp_path / "converted", **options)
    close(found, losses(llama, tmp_path / "original", **options), rtol=1e-3, atol=1e-5)
    assert len(found) == 6
