"""Render a profile as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from te_transform.page.html import whole


def page_of_profile(profile: Any) -> str:
    """Return a te_transform.Profile as one self-contained page."""
    body = f"<h1>{escape(profile.title)}</h1>\n<pre>{escape(str(profile))}</pre>"
    return whole(profile.title, body, (), ())
