"""Draw docs/images/report.png, the first screen of a report; run in the root of the repository.

It needs Chromium. The models are those of the quickstart, and two layers of the last one are swapped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

import raymerge
from raymerge.cli.render.report_page import report_page
from raymerge.verifier.observations import observations

MODELS = Path("configs/quickstart/models")
SWAPPED = {1: 4, 4: 1}
PICTURE = Path(__file__).with_name("report.png")


def swapped(model: Path, target: Path) -> Path:
    """A copy of a model in which two layers have changed places."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    places = {name: re.sub(r"(?<=layers\.)\d+", _other, name) for name in tensors}
    save_file(
        {places[name]: value for name, value in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


def _other(number: re.Match[str]) -> str:
    return str(SWAPPED.get(int(number[0]), int(number[0])))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        french = swapped(MODELS / "french", Path(scratch) / "models" / "french")
        parents = [MODELS / "code", MODELS / "english", french]
        made = raymerge.report(
            {
                "merge_method": "task_arithmetic",
                "base_model": str(MODELS / "base"),
                "models": [{"model": str(each), "parameters": {"weight": 1.0}} for each in parents],
            }
        )
        page = Path(scratch) / "report.html"
        text = report_page(made, observations(made), numbers="report.parquet")
        page.write_text(text.replace(f"{scratch}/", ""), encoding="utf-8")
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1060,830",
        )
        place = f"--user-data-dir={scratch}/browser"
        subprocess.run(["chromium", *options, place, f"--screenshot={PICTURE}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
