"""Write the HTML of a page: one self-contained file that loads nothing from the network.

Tables hold all content. When a block comes into view, page.js draws it from its data, with the layout of
dagre.js.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources

from te_transform.page.blocks import Block
from te_transform.page.model import model

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_DETAIL = (
    '<aside id="detail" aria-live="polite">'
    "<p>Click an operation to see what it computes, and what it replaces.</p></aside>"
)


@cache
def _asset(name: str) -> str:
    return resources.files("te_transform.page").joinpath(name).read_text("utf-8")


def whole(title: str, body: str, blocks: Sequence[Block]) -> str:
    """Return a page with `body`, and the drawn blocks below it."""
    fitting = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    style = f"<style>{_asset('page.css')}</style>"
    head = f'<meta charset="utf-8">{policy}{fitting}<title>{escape(title)}</title>{style}'
    shown = f"<main>{body}</main>"
    if blocks:
        scripts = f"<script>{_asset('dagre.js')}</script><script>{_asset('page.js')}</script>"
        shown = f"<main>{body}{model(blocks)}</main>{_DETAIL}{scripts}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{shown}</body></html>\n'
