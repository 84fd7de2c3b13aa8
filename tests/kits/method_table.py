"""Tables of docs: of methods, and of formats that are only copied, made of what declares them.

Run as a script it writes them there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from raymerge.methods import BaseUse, Method, Parameter, methods

_ROOT = Path(__file__).parents[2]
DOCUMENT = _ROOT / "docs" / "methods.md"
COPIED_DOCUMENT = _ROOT / "docs" / "how-to" / "convert.md"
_COPIED = _ROOT / "raymerge" / "checkpoints" / "quantisation" / "other_methods.toml"
_COPIED_HEAD = "| format | what makes a model of it that can be merged |\n|---|---|\n"
_BASE = {BaseUse.REQUIRED: "required", BaseUse.OPTIONAL: "optional", BaseUse.UNUSED: "not used"}


def with_table(text: str, declared: Iterable[Method]) -> str:
    rows = "".join(f"| {' | '.join(_cells(method))} |\n" for method in declared)
    return re.sub(r"(?:^\| `.*\n)+", lambda _: rows, text, count=1, flags=re.MULTILINE)


def with_copied_formats(text: str) -> str:
    formats = tomllib.loads(_COPIED.read_text())["method"]
    table = _COPIED_HEAD + "".join(f"| {each['title']} | {each['advice']} |\n" for each in formats)
    return re.sub(f"{re.escape(_COPIED_HEAD)}(?:\\|.*\n)*", lambda _: table, text, count=1)


def _cells(method: Method) -> tuple[str, ...]:
    paper = "-" if method.paper == "-" else f"[{method.paper}](https://arxiv.org/abs/{method.paper})"
    parameters = "<br>".join(_cell(parameter) for parameter in method.parameters)
    return f"`{method.name}`", method.summary, method.access.value, _BASE[method.base], parameters, paper


def _cell(parameter: Parameter) -> str:
    facts = ["per source"] if parameter.scope == "source" else []
    default = "none" if parameter.default is None else str(parameter.default).lower()
    facts.append("required" if parameter.required else default)
    facts += [] if parameter.effective else ["no effect"]
    return f"`{parameter.name}` ({', '.join(facts)})"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), methods().values()))
    COPIED_DOCUMENT.write_text(with_copied_formats(COPIED_DOCUMENT.read_text()))
