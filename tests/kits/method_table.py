"""The table of docs/methods.md, made of the declarations; run as a script it writes the table there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from raymerge.methods import BaseUse, Method, Parameter, methods

DOCUMENT = Path(__file__).parents[2] / "docs" / "methods.md"
_BASE = {BaseUse.REQUIRED: "required", BaseUse.OPTIONAL: "optional", BaseUse.UNUSED: "not used"}


def with_table(text: str, declared: Iterable[Method]) -> str:
    rows = "".join(f"| {' | '.join(_cells(method))} |\n" for method in declared)
    return re.sub(r"(?:^\| `.*\n)+", lambda _: rows, text, count=1, flags=re.MULTILINE)


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
