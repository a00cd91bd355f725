"""Write the pictures of docs/page.md and docs/profile.md: a Llama 3 8B, and a small GPT-2, in Chromium.

python docs/report.py
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from playwright.sync_api import Browser, Page, sync_playwright
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import te_transform

DOCS = Path(__file__).parent
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, vocab_size=32000, **SIZES))
        ids = torch.zeros(2, 4096, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    model = model.to(torch.bfloat16).train()
    report = te_transform.inspect(model, batch, backend="te", recipe="fp8-delayed")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report.to_html(file := Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        with opened(browser, file, 1280, 620) as page:
            page.screenshot(path=DOCS / "page-overview.png")
        with opened(browser, file, 1280, 960) as page:
            show_layers(page)
            page.screenshot(path=DOCS / "report.png")
        with opened(browser, file, 1600, 900, "dark") as page:
            show_layers(page)
            page.locator(".operation.fused", has_text="layernorm_mlp").first.click()
            page.screenshot(path=DOCS / "page-detail.png")
        with opened(browser, file, 390, 844) as page:
            show_layers(page)
            page.screenshot(path=DOCS / "page-phone.png")
        with opened(browser, profiled(Path(folder)), 1280, 780, "dark") as page:
            page.screenshot(path=DOCS / "page-profile.png")
        browser.close()


def profiled(folder: Path) -> Path:
    """Return the page of the profile in docs/profile.md."""
    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000, attn_implementation="eager")
    ids = torch.zeros(4, 256, dtype=torch.int64)
    file = folder / "profile.html"
    te_transform.profile(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}).to_html(file)
    return file


@contextmanager
def opened(browser: Browser, file: Path, width: int, height: int, scheme: str = "light") -> Iterator[Page]:
    """Open a page in a window of this size, in a light or dark color scheme."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(file.as_uri())
    yield page
    page.close()


def show_layers(page: Page) -> None:
    """Scroll to the block of the layers, below the sticky controls, and wait until it is drawn."""
    layers = page.locator(".block", has_text="model.layers").filter(has=page.locator(".times"))
    layers.evaluate("block => block.scrollIntoView()")
    layers.locator(".operation.fused").first.wait_for()
    page.evaluate("scrollBy(0, -60)")


if __name__ == "__main__":
    main()
