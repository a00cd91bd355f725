"""Write docs/report.png: a layer of Llama 3 8B on the page of a report, in Chromium.

python docs/report.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def main() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32000, **SIZES))
        ids = torch.zeros(2, 4096, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    model = model.to(torch.bfloat16).train()
    report = te_transform.inspect(model, batch, backend="te", recipe="fp8-delayed")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report.to_html(file := Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1440})
        page.goto(file.as_uri())
        page.locator(".pair", has_text="model.layers").evaluate("pair => scrollTo(0, pair.offsetTop - 16)")
        page.locator(".operation.fused", has_text="layernorm_mlp").first.click()
        page.screenshot(path=Path(__file__).parent / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
