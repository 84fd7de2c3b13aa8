"""A headless Chromium that opens a page without any network, and what it saw."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--log-level=0", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-features=NetworkTimeServiceQuerying,OptimizationHints,AutofillServerCommunication",
    "--disable-default-apps", "--disable-extensions", "--disable-client-side-phishing-detection",
)  # fmt: skip
_DARK = "--blink-settings=preferredColorScheme=0"


@dataclass(frozen=True, slots=True)
class Opened:
    dom: str
    console: tuple[str, ...]
    """Lines that the page wrote to its console: errors, and refused or failed requests among them."""
    requests: tuple[str, ...]
    """Addresses that it asked for, but for its own."""


def find_browser() -> str:
    """The program; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium to open the page in")
    return found


def open_page(page: Path, scratch: Path, *, dark: bool, size: tuple[int, int] = (1280, 900)) -> Opened:
    log = scratch / "requests.json"
    done = _run(page, scratch, dark, size, "--dump-dom", f"--log-net-log={log}")
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = [each["params"] for each in events if "initiator" in each.get("params", {})]
    # What the browser asks for by itself, such as updates, comes of no page.
    others = {each["url"] for each in asked if each["initiator"] != "not an origin" and "url" in each}
    return Opened(done.stdout, tuple(lines), tuple(sorted(each for each in others if each != page.as_uri())))


def picture(page: Path, scratch: Path, target: Path, *, dark: bool, size: tuple[int, int]) -> Path:
    _run(page, scratch, dark, size, f"--screenshot={target}")
    return target


def _run(
    page: Path, scratch: Path, dark: bool, size: tuple[int, int], *options: str
) -> subprocess.CompletedProcess[str]:
    command = [
        find_browser(), *_QUIET, *([_DARK] if dark else []), f"--user-data-dir={scratch / 'profile'}",
        f"--window-size={size[0]},{size[1]}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
