"""The colors of a page: the same rule and the same class of operations have the same color on every page."""

from __future__ import annotations

import zlib

_RULES = {
    "merge_siblings": 305,
    "layernorm_mlp": 155,
    "layernorm_linear": 205,
    "linear": 255,
    "wide_linear": 230,
    "attention": 75,
    "rotary": 115,
    "cross_entropy": 340,
    "chunked_loss": 340,
    "pad_vocabulary": 280,
    "experts": 180,
}
_HUES = {
    "products": 255,
    "attention": 75,
    "norms": 155,
    "norms, activations, copies": 155,
    "elementwise": 115,
    "loss": 340,
    "quantization": 305,
    "casts": 305,
    "copies": 205,
    "compiled code": 180,
    "exposed communication": 55,
    "weights": 305,
    "AdamW's state": 280,
    "gradients": 325,
    "outputs": 55,
}
_OTHER_HUES = (90, 130, 170, 190, 230, 270, 295, 320)  # no red, which means failure


def hue_of(rule: str) -> int:
    """Return the hue of a rule in OKLCH, in degrees; rules of other packages get one by their name."""
    return _RULES.get(rule) or _OTHER_HUES[zlib.crc32(rule.encode()) % len(_OTHER_HUES)]


def color_of(kind: str) -> str:
    """Return the CSS color of a class of operations or of a rule; gray for classes without a color."""
    hue = _HUES.get(kind) or _RULES.get(kind)
    return f"oklch(0.68 0.13 {hue})" if hue else "oklch(0.68 0 0)"
