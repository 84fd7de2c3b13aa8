"""Print how raymerge's merges compare with the reference's: ``python tests/conformance_table.py PACK``.

One line for every recipe of a conformance pack and every case of the golden file beside it: the verdict, the
name, the largest deviation, and a reason where there is one. Ends with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kits.conformance import Judged, recipe_names, run_recipes
from kits.golden_cases import golden_cases


def table(pack: Path, golden: Path) -> Iterator[Judged]:
    """All lines: recipes, then golden cases."""
    with tempfile.TemporaryDirectory() as place:
        for merge in run_recipes(pack, Path(place), recipe_names(pack)).values():
            yield merge.judged()
    for case in golden_cases(golden):
        yield case.judged()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pack", type=Path, metavar="PACK", help="a conformance pack: recipes, models, manifest"
    )
    parser.add_argument("golden", type=Path, nargs="?", help="default: reference/golden.json beside PACK")
    given = parser.parse_args()
    pack = given.pack.resolve()
    if not (pack / "manifest.json").is_file():
        parser.error(f"{given.pack} has no manifest.json: it is no conformance pack")
    counts: collections.Counter[str] = collections.Counter()
    for judged in table(pack, given.golden or pack.parent / "reference" / "golden.json"):
        print(judged.line(), flush=True)
        counts[judged.verdict] += 1
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
