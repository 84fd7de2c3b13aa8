"""What benchmarks run on."""

from __future__ import annotations

import os
from pathlib import Path


def machine(proc: Path = Path("/proc")) -> str:
    cpus = proc / "cpuinfo"
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    name = names[0] if names else "unknown processor"
    return f"{os.cpu_count()} cores of {name}, {memory:.0f} GB of memory, Linux {os.uname().release}"
