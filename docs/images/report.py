"""Draw docs/images/report.svg, the top of a report's page; run in the root of the repository.

The models are those of the quickstart, and two layers of the last one are swapped.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

import raymerge
from raymerge.cli.render.report_page import report_page
from raymerge.verifier.observations import observations

MODELS = Path("configs/quickstart/models")
SWAPPED = {1: 4, 4: 1}
PICTURE = Path(__file__).with_name("report.svg")
WIDTH, HEIGHT = 1060, 890
SAYS = (
    "The top of a report's page: layers 1 and 4 of the third model are swapped, and stand out in a diagram."
)
SVG = """<svg xmlns="http://www.w3.org/2000/svg"
 viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{says}</title>
<style>{style}</style>
<foreignObject width="100%" height="100%">
<div xmlns="http://www.w3.org/1999/xhtml" class="page">{body}</div>
</foreignObject>
</svg>
"""


def swapped(model: Path, target: Path) -> Path:
    """A copy of a model in which two layers have changed places."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    places = {name: re.sub(r"(?<=layers\.)\d+", _other, name) for name in tensors}
    moved = {places[name]: value for name, value in tensors.items()}
    save_file(moved, target / "model.safetensors", {"format": "pt"})
    return target


def _other(number: re.Match[str]) -> str:
    return str(SWAPPED.get(int(number[0]), int(number[0])))


def make_page() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        french = swapped(MODELS / "french", Path(scratch) / "models" / "french")
        parents = [MODELS / "code", MODELS / "english", french]
        made = raymerge.report(
            {
                "name": "assistant",
                "merge_method": "task_arithmetic",
                "base_model": str(MODELS / "base"),
                "models": [{"model": str(each), "parameters": {"weight": 1.0}} for each in parents],
            }
        )
        page = report_page(made, observations(made), numbers="report.parquet")
        return page.replace(f"{scratch}/", "")


def as_picture(page: str) -> str:
    """The first screen and the first section, as HTML within SVG, which follows the reader's theme."""
    style = re.search(r"(?s)<style>(.*)</style>", page)
    top = re.search(r"(?s)<main>.*?</section>", page)
    assert style is not None
    assert top is not None
    body = top[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ') + "</main>"
    rules = style[1].replace("body {", ".page { height: 100%;")
    return SVG.format(width=WIDTH, height=HEIGHT, says=SAYS, style=rules, body=body)


if __name__ == "__main__":
    PICTURE.write_text(as_picture(make_page()), encoding="utf-8")
