"""A file system whose files can share blocks, for a test that wants one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def reflink_mount(directory: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("mounting an XFS image takes root and mkfs.xfs")
    image, place = directory / "image", directory / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=False).returncode:
        pytest.skip("loop devices cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
