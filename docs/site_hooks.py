"""What the site's build does beside mkdocs' own: links out of docs/, and a look at what pages load.

In the repository a link to a file that is no page works (a test follows it); the built site has nothing to lead to,
so it shows the file's path instead.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

__all__ = ["loads_from_elsewhere", "on_page_markdown", "on_post_page", "without_repository_links"]

_log = logging.getLogger("mkdocs.hooks.site")  # a warning below "mkdocs" fails a strict build

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)\s]*)?\)")
_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page's text."""
    return without_repository_links(markdown, str(page.file.src_uri))


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Called by mkdocs with every page's HTML."""
    for address in loads_from_elsewhere(output):
        _log.warning("%s loads %s: the site takes nothing from elsewhere", page.file.src_uri, address)


def without_repository_links(markdown: str, page: str) -> str:
    """Return `markdown` with each link that leaves ``docs/`` replaced by its text and the path it leads to.

    Args:
        markdown: the page's text.
        page: its path below ``docs/``.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return match.group()
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def loads_from_elsewhere(html: str) -> list[str]:
    """Return the addresses of scripts, styles, images and frames that `html` takes from another host."""
    return _LOADED.findall(html)
