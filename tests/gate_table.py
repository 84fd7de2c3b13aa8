"""Print how mixtures with each kind of router behave: ``python tests/gate_table.py PACK``.

Three experts that know one kind of text each, on the base of a behaviour pack, with a router of every
``gate_mode`` made from the same prompts. A line for each: the mode, experts for each token, the loss (nats
per token of held-out text) by domain and their mean, and for how many of a domain's tokens the router puts
the domain's own expert first. Takes some seconds of one core a line. Ends with 1 if a mixture is not made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kits.behaviour import DOMAINS, Behaviour, Gate, judge, mixtures

GATES = (
    Gate("random"),
    Gate("uniform_random"),
    Gate("hidden"),
    Gate("hidden_avg"),
    Gate("cheap_embed"),
    Gate("router_input"),
    Gate("centroid"),
    Gate("centroid", from_file=True),
    Gate("ridge"),
    Gate("ridge", from_file=True),
    Gate("router_input", experts_per_token=2),
    Gate("ridge", experts_per_token=2),
)
"""The lines of the table."""

HEADING = (
    "| gate mode | experts a token | code | English | French | mean | right expert first |",
    "|---|---|---|---|---|---|---|",
)


def line(gate: Gate, found: Behaviour) -> str:
    """A mixture's line of the table."""
    losses = (f"{found.loss[domain]:.3f}" for domain in (*DOMAINS, "avg"))
    right = " / ".join(f"{100 * found.right_first[domain]:.0f}" for domain in DOMAINS)
    mode = f"{gate.mode}, prompts joined in a file" if gate.from_file else gate.mode
    return f"| {' | '.join((mode, str(gate.experts_per_token), *losses, f'{right} %'))} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pack", type=Path, metavar="PACK", help="a behaviour pack: models, recipes, texts, eval.py"
    )
    pack = parser.parse_args().pack.resolve()
    if not (pack / "eval.py").is_file():
        parser.error(f"{pack} has no eval.py: it is no behaviour pack")
    with tempfile.TemporaryDirectory() as place:
        outcomes = mixtures(pack, Path(place), GATES)
        lost = {name: outcome for name, outcome in outcomes.items() if outcome.code}
        for name, outcome in lost.items():
            print(f"{name}: exit code {outcome.code}\n{outcome.text}", file=sys.stderr)
        if lost:
            return 1
        found = judge(pack, Path(place) / "outs", list(outcomes))
    print("\n".join((*HEADING, *(line(gate, found[gate.name]) for gate in GATES))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
