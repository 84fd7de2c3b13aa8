"""Commands of mergekit, one after the other in one process: JSON lists of words in, a JSON line for each out.

Runs in the peer's environment and can import nothing of ours. A line is the error, empty for none; of a
command without words it is its options.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

_MODULES = {
    "mergekit-yaml": "run_yaml",
    "mergekit-moe": "moe",
    "mergekit-multi": "multimerge",
    "mergekit-pytorch": "merge_raw_pytorch",
    "mergekit-extract-lora": "extract_lora",
    "mergekit-tokensurgeon": "tokensurgeon",
    "mergekit-layershuffle": "layershuffle",
    "mergekit-legacy": "legacy",
    "bakllama": "bakllama",
}


def _run(program: str, words: list[str]) -> object:
    command = importlib.import_module(f"mergekit.scripts.{_MODULES[program]}").main
    if not words:
        names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        return sorted(name for name in names if name.startswith("-"))
    try:
        command(words, standalone_mode=False)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    told = sys.stdout
    with open(os.devnull, "w") as nowhere:
        for program, *words in json.load(sys.stdin):
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                answer = _run(program, words)
            print(json.dumps(answer), file=told, flush=True)


if __name__ == "__main__":
    main()
