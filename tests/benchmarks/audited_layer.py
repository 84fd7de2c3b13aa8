"""One layer of experts of the true size, of models that are published quantised: merged and audited.

    python tests/benchmarks/audited_layer.py [--family v4|gpt-oss|kimi] [--place DIRECTORY] [--share SHARE]

Two parents have one layer of DeepSeek-V4-Flash, gpt-oss-120b or Kimi-K2-Thinking with all its experts, in the
published names, dtypes and shapes, beside a small vocabulary. Their codes and scales are random. They are
merged as by ``raymerge submit`` on this machine, and a share of each tensor is recomputed by ``raymerge
audit``. It prints sizes and times, and ends with 1 where the audit finds a number that is not what it should
be. 11 GB of disk for DeepSeek-V4, 5 for gpt-oss, 29 for Kimi-K2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine
from benchmarks.quantised_layer import fill
from kits.checkpoint_maker import sparse_checkpoint
from kits.deepseek_headers import KIMI_CONFIG, deepseek_shapes, int4_or_plain
from kits.deepseek_v4_headers import FLASH_CONFIG, v4_shapes, v4_specs
from kits.fused_headers import GPT_OSS_CONFIG, gpt_oss_120b_specs

from raymerge.api import AuditOptions, audit, submit
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import open_checkpoint
from raymerge.options import RunOptions

_SEED = 0
_VOCABULARY = 1024


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


def main() -> int:
    asked = _asked()
    family = FAMILIES[asked.family]()
    with tempfile.TemporaryDirectory(dir=asked.place) as place:
        return _measure(family, Path(place), asked.share)


def _measure(family: Family, place: Path, share: float) -> int:
    roots = [sparse_checkpoint(place / name, [list(family.specs)], family.config) for name in "ab"]
    for seed, root in enumerate(roots):
        fill(root, tuple(open_checkpoint(root, str(root)).tensors.values()), seed=seed)
    nbytes = sum(spec.nbytes for spec in family.specs)
    _say(f"{len(family.specs):,} tensors, {nbytes / 1e9:.2f} GB in each parent; {machine()}")
    models = [{"model": str(root)} for root in roots]
    recipe = {
        "merge_method": "slerp",
        "base_model": str(roots[0]),
        "models": models,
        "parameters": {"t": 0.3},
    }
    began = time.perf_counter()
    submit(recipe, place / "out", RunOptions(inline=True))
    seconds = time.perf_counter() - began
    rate = 2 * nbytes / 1e9 / seconds
    _say(f"planned, merged, verified and published in {seconds:.1f} s, {rate:.2f} GB/s of the parents")
    began = time.perf_counter()
    verdict = audit(place / "out", AuditOptions(share, seed=_SEED), RunOptions(inline=True))
    _say(
        f"audited, {share:.1%} of each tensor, in {time.perf_counter() - began:.1f} s: "
        f"{verdict.num_problems} problems"
    )
    for problem in verdict.problems:
        _say(str(problem))
    return int(verdict.num_problems > 0)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="v4", help="whose layer (v4)")
    parser.add_argument("--place", type=Path, help="where files are made")
    parser.add_argument(
        "--share", type=float, default=0.01, help="part of each tensor that is audited (0.01)"
    )
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
