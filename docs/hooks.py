"""Links of pages that leave docs/ become the path in the repository, as text.

One that is not there is an error, as every broken link is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def path_of(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: there is no {target.relative_to(ROOT)}")
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if match[1].strip("`") == path else f"{match[1]} (`{path}`)"

    return _LINK.sub(path_of, markdown)
