"""How few evaluations a search needs: three weights of the quickstart's models, by strategy, against a grid.

    python tests/benchmarks/search.py grid OUT [--low 0 --high 1]
    python tests/benchmarks/search.py gp OUT

``grid`` evaluates the points of the 9 x 9 x 9 grid over 0 to 1 that lie between ``--low`` and ``--high``; all
729 take an hour on a core. Any other strategy has 40 evaluations. Both go on where they were stopped. Prints
the best mean loss (nats per token of held-out text, as the example's recipe says), and after how many
evaluations it was lower than a thousandth above that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import raymerge
from raymerge.events import Event, TrialEvaluated

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "searches" / "weights.yml"
STEP = 0.125
CLOSE = 0.001


def recipe(strategy: str, low: float, high: float) -> Mapping[str, Any]:
    given: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    given["search"]["strategy"] = strategy
    if strategy == "grid":
        del given["search"]["evaluations"]
        for model in given["models"]:
            model["parameters"]["weight"] = {"search": {"low": low, "high": high, "step": STEP}}
    return given


def show(event: Event) -> None:
    if isinstance(event, TrialEvaluated) and event.score is not None and not event.is_recorded:
        print(f"{event.number}: {-event.score:.5f} {list(event.values.values())}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("strategy")
    parser.add_argument("output")
    parser.add_argument("--low", type=float, default=0.0)
    parser.add_argument("--high", type=float, default=1.0)
    parser.add_argument("--evaluators", type=int, default=1)
    parsed = parser.parse_args()
    result = raymerge.search(
        recipe(parsed.strategy, parsed.low, parsed.high),
        parsed.output,
        raymerge.RunOptions(threads=1),
        raymerge.SearchOptions(evaluators=parsed.evaluators),
        on_event=show,
    )
    losses = [trial.metrics["mean"] for trial in result.trials]
    best = min(losses)
    close = next(number for number, loss in enumerate(losses, start=1) if loss < best + CLOSE)
    seconds = sum(trial.seconds for trial in result.trials) / len(losses)
    print(
        f"{parsed.strategy}: {best:.5f} at {list(result.best.values.values())} of {len(losses)} evaluations"
    )
    print(f"within {CLOSE} of it after {close}; {seconds:.1f} s each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
