"""What the numbers of a report say, in sentences: faults of the models first, then what is worth knowing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from raymerge.verifier.measurements import Report
from raymerge.verifier.observations.faults import FAULTS, far_off
from raymerge.verifier.observations.notes import NOTES, usual
from raymerge.verifier.observations.scene import Observation, Scene, make_scene, short_names

__all__ = ["Observation", "observations", "short_names"]


def observations(report: Report) -> tuple[Observation, ...]:
    """The most important first; where nothing is unusual, one sentence that says so."""
    scene = make_scene(report)
    found = [each for rule in FAULTS for each in rule(scene)]
    found += [*far_off(scene, found), *(each for rule in NOTES for each in rule(scene))]
    found = [each for each in found if not (each.kind == "layer_stands_out" and _is_explained(each, found))]
    if not [each for each in found if each.kind != "no_base"]:
        found.insert(0, usual(scene))
    found.sort(key=lambda each: each.severity != "problem")
    return tuple(_numbered_once(found, scene))


def _is_explained(layer: Observation, found: Sequence[Observation]) -> bool:
    problems = [
        each for each in found if each.severity == "problem" and set(each.parents) & set(layer.parents)
    ]
    return any(set(layer.layers) <= set(each.layers) for each in problems)


def _numbered_once(found: Iterable[Observation], scene: Scene) -> Iterator[Observation]:
    """Parents are called by number and name at first, then by name alone."""
    known = set[int]()
    for each in found:
        sentence = each.sentence
        for k, name in enumerate(scene.names):
            before, met, after = sentence.partition(scene.parent(k))
            if met:
                first = name if k in known else met
                sentence = f"{before}{first}{after.replace(met, name)}"
                known.add(k)
        # A name keeps its own case.
        is_name = each.sentence.startswith("parent ") and not sentence.startswith("parent ")
        yield replace(each, sentence=sentence if is_name else sentence[0].upper() + sentence[1:])
