"""A command of mergekit as it is, in a process that tells when its imports are over and when it is done.

Runs in the peer's environment, as ``python peer_run.py yaml|moe ARGUMENTS``: it can import nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import sys

_MODULES = {"yaml": "mergekit.scripts.run_yaml", "moe": "mergekit.scripts.moe"}


def _tell(event: str) -> None:
    print(json.dumps({"event": event}), flush=True)


def main() -> None:
    program, *arguments = sys.argv[1:]
    command = importlib.import_module(_MODULES[program]).main
    _tell("started")
    command(arguments, standalone_mode=False)
    _tell("published")


if __name__ == "__main__":
    main()
