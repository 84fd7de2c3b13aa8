"""What the numbers of a report say, in sentences: faults of the models first, then what is worth knowing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from raymerge.verifier.measurements import Report
from raymerge.verifier.observations.correspondence import is_matrix
from raymerge.verifier.observations.damage import RESULT_BROKEN, broken_result, far_off
from raymerge.verifier.observations.facts import (
    Facts,
    Observation,
    changes_of,
    gather_facts,
    range_text,
    short_names,
)
from raymerge.verifier.observations.faults import FAULTS
from raymerge.verifier.observations.notes import NOTES, OF_RESULTS, not_measured, usual

__all__ = ["Observation", "changes_of", "is_matrix", "observations", "range_text", "short_names"]


def observations(report: Report) -> tuple[Observation, ...]:
    """The most important first; where nothing is unusual, one sentence that says so."""
    facts = gather_facts(report)
    faults = [each for rule in FAULTS for each in rule(facts)]
    faults = [each for each in faults if not _is_explained(each, faults)]
    faults += far_off(facts, faults)
    sound = replace(facts, faulty=frozenset(k for each in faults for k in each.parents))
    faults += broken_result(facts)
    notes = [each for rule in NOTES for each in rule(sound)]
    if any(each.kind == RESULT_BROKEN for each in faults):
        notes = [each for each in notes if each.kind not in OF_RESULTS]
    if not faults and not [each for each in notes if each.kind != "no_base"]:
        notes.insert(0, usual(facts))
    return tuple(_numbered_once([*faults, *not_measured(facts), *notes], facts))


def _is_explained(fault: Observation, faults: Sequence[Observation]) -> bool:
    """Whether a role is unlike the base's because layers or experts have moved."""
    kinds = {each.kind for each in faults if set(each.parents) & set(fault.parents)}
    return fault.kind == "role_unlike" and bool(kinds & {"layers_moved", "experts_permuted"})


def _numbered_once(seen: Iterable[Observation], facts: Facts) -> Iterator[Observation]:
    """Parents are called by number and name at first, then by name alone."""
    known = set[int]()
    for each in seen:
        sentence = each.sentence
        for k, name in enumerate(facts.names):
            before, met, after = sentence.partition(facts.parent(k))
            if met:
                first = name if k in known else met
                sentence = f"{before}{first}{after.replace(met, name)}"
                known.add(k)
        # A name keeps its own case.
        is_name = any(sentence.startswith(name) for name in facts.names)
        yield replace(each, sentence=sentence if is_name else sentence[0].upper() + sentence[1:])
