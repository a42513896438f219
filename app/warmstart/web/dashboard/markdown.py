"""A memory's markdown as HTML that can do nothing: no markup of its own, no images, links to the web and mail only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup

_ALLOWED = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
#: Fences, headings, bullets and quotes at the start of a line; links and images; emphasis and code.
_SIGNS: Final = (
    (re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*(?:#{1,6}|[-*+>])[ \t]+", re.MULTILINE), ""),
    (re.compile(r"!?\[([^\[\]\n]*)\]\([^()\s]*\)"), r"\1"),
    (re.compile(r"\*\*|__|`"), ""),
)
#: Under the page's own heading.
FIRST_LEVEL: Final = 2


def render(text: str) -> Markup:
    return Markup(_markdown().render(text))  # noqa: S704 - made by the renderer below, which escapes all of `text`


def plain(text: str) -> str:
    """About what a reader sees of `text`, for the few words of it in a list."""
    for pattern, instead in _SIGNS:
        text = pattern.sub(instead, text)
    return text.strip()


@cache
def _markdown() -> MarkdownIt:
    # lines end where they end: memories are notes, not typeset prose
    markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    markdown.validateLink = lambda url: bool(_ALLOWED.match(url))  # type: ignore[method-assign]
    markdown.core.ruler.push("harmless", _harmless)
    markdown.add_render_rule("image", _image)
    return markdown


def _harmless(state: StateCore) -> None:
    headings = [token for token in state.tokens if token.type == "heading_open"]
    highest, before = min((int(token.tag[1]) for token in headings), default=1), FIRST_LEVEL - 1
    for token in state.tokens:
        if token.type == "heading_open":
            # one below the page's, and no level left out, as those who hear a page need it
            before = min(int(token.tag[1]) - highest + FIRST_LEVEL, before + 1, 6)
        if token.type.startswith("heading_"):
            token.tag = f"h{before}"
        if token.type.endswith("_open"):
            token.attrSet("dir", "auto")
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("rel", "nofollow noopener noreferrer")


def _image(self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> Any:
    """Nothing is loaded: the picture's text stands there, as a link to it where it has an address of the web."""
    token = tokens[idx]
    label = Markup.escape(token.content or "image")
    source = Markup.escape(str(token.attrGet("src") or ""))
    return f'<a class="image" href="{source}" rel="nofollow noopener noreferrer">{label}</a>'
