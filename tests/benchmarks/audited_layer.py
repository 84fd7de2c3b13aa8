"""One layer of experts of the true size, of models that are published quantised: merged and audited.

    python tests/benchmarks/audited_layer.py [v4] [gpt-oss] [kimi] [--place DIRECTORY] [--share SHARE]

Two parents have one layer of DeepSeek-V4-Flash, gpt-oss-120b or Kimi-K2-Thinking with all its experts, in the
published names, dtypes and shapes, beside a small vocabulary. Their codes and scales are random. They are
merged as by ``raymerge submit`` on this machine, and a share of each tensor is recomputed by ``raymerge
verify --level audit``. It prints a table with a line for each model, and ends with 1 where the audit finds a
number that is not what it should be. 11 GB of disk for DeepSeek-V4, 5 for gpt-oss, 29 for Kimi-K2.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine, status_bytes
from benchmarks.quantised_layer import fill
from kits.checkpoint_maker import sparse_checkpoint
from kits.deepseek_headers import KIMI_CONFIG, deepseek_shapes, int4_or_plain
from kits.deepseek_v4_headers import FLASH_CONFIG, v4_shapes, v4_specs
from kits.fused_headers import GPT_OSS_CONFIG, gpt_oss_120b_specs
from kits.recipe_maker import slerp

from raymerge.api import AuditOptions, audit, submit
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import Problem
from raymerge.events import Event, OnEvent, SegmentDone
from raymerge.options import RunOptions

_SEED = 0
_VOCABULARY = 1024
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Family:
    config: Mapping[str, Any]
    specs: Sequence[TensorSpec]


def _of_v4() -> Family:
    one = {
        "num_hidden_layers": 1,
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [4],
    }
    config = {**FLASH_CONFIG, **one, "vocab_size": _VOCABULARY}
    return Family(config, [spec for named in v4_shapes(config) for spec in v4_specs(*named)])


def _of_gpt_oss() -> Family:
    config = {**GPT_OSS_CONFIG, "num_hidden_layers": 1, "vocab_size": _VOCABULARY}
    return Family(config, gpt_oss_120b_specs(config))


def _of_kimi() -> Family:
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": _VOCABULARY}
    config = {**KIMI_CONFIG, **one}
    return Family(config, [spec for named in deepseek_shapes(config) for spec in int4_or_plain(*named)])


FAMILIES = {"v4": _of_v4, "gpt-oss": _of_gpt_oss, "kimi": _of_kimi}
_TITLES = (
    *("model", "tensors", "bytes of a parent", "merged in", "bytes read", "of both parents", "peak memory"),
    *("audited in", "bytes read", "numbers recomputed", "of a code away at most", "problems"),
)


def main() -> int:
    asked = _asked()
    _say(f"{machine()}; {asked.share:.1%} of each tensor audited\n")
    _say(f"| {' | '.join(_TITLES)} |\n|{'---|' * len(_TITLES)}")
    num_problems = 0
    for name in asked.families or FAMILIES:
        with tempfile.TemporaryDirectory(dir=asked.place) as place:
            figures, problems = _measured(FAMILIES[name](), Path(place), asked.share)
        _say(f"| {' | '.join((name, *figures))} |")
        for problem in problems:
            sys.stderr.write(f"{problem}\n")
        num_problems += len(problems)
    return int(num_problems > 0)


def _measured(family: Family, place: Path, share: float) -> tuple[Sequence[str], Sequence[Problem]]:
    roots = [sparse_checkpoint(place / name, [list(family.specs)], family.config) for name in "ab"]
    for seed, root in enumerate(roots):
        fill(root, tuple(open_checkpoint(root, str(root)).tensors.values()), seed=seed)
    nbytes = sum(spec.nbytes for spec in family.specs)
    recipe, out, here = slerp(*roots, t=0.3), place / "out", RunOptions(inline=True)
    # The peak from here on: filling the parents takes memory of its own.
    Path("/proc/self/clear_refs").write_text("5")
    _, merging, merge_nbytes = _timed(lambda count: submit(recipe, out, here, on_event=count))
    peak = status_bytes(os.getpid())["VmHWM"]
    chosen = AuditOptions(share, seed=_SEED)
    verdict, auditing, audit_nbytes = _timed(lambda count: audit(out, chosen, here, on_event=count))
    figures = (
        f"{len(family.specs):,}",
        f"{nbytes / 1e9:.2f} GB",
        f"{merging:.1f} s",
        f"{merge_nbytes / 1e9:.2f} GB",
        f"{merge_nbytes / (2 * nbytes):.3f}",
        f"{peak / 1e9:.2f} GB",
        f"{auditing:.1f} s",
        f"{audit_nbytes / 1e9:.2f} GB",
        f"{verdict.judged:,}",
        f"{verdict.farthest:.3f}",
        f"{verdict.num_problems}",
    )
    return figures, verdict.problems


def _timed(command: Callable[[OnEvent], _T]) -> tuple[_T, float, int]:
    """What a command gives, its seconds, and how many bytes it reads."""
    read = 0

    def count(event: Event) -> None:
        nonlocal read
        read += event.read_bytes if isinstance(event, SegmentDone) else 0

    began = time.perf_counter()
    result = command(count)
    return result, time.perf_counter() - began, read


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="MODEL", help=f"{', '.join(FAMILIES)} (all)")
    parser.add_argument("--place", type=Path, help="where files are made")
    parser.add_argument(
        "--share", type=float, default=0.01, help="part of each tensor that is audited (0.01)"
    )
    asked = parser.parse_args()
    if unknown := set(asked.families) - FAMILIES.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    return asked


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
