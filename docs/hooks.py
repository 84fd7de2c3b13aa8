"""What pages of the site have in place of what stands in them.

Links that leave docs/ become the path in the repository, as text; one that is not there is an error, as every
broken link is. The formats that are only copied become a table.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
_ONLY_COPIED = "<!-- table: only copied -->"
_METHODS = ROOT / "raymerge" / "checkpoints" / "quantisation" / "other_methods.toml"
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

    return _LINK.sub(path_of, markdown).replace(_ONLY_COPIED, _only_copied())


def _only_copied() -> str:
    methods = tomllib.loads(_METHODS.read_text(encoding="utf-8"))["method"]
    head = "| format | what makes a model of it that can be merged |\n|---|---|"
    return "\n".join([head, *(f"| {each['title']} | {each['advice']} |" for each in methods)])
