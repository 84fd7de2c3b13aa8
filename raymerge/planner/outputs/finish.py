"""The last step of planning: decisions become files, tables and a manifest, and are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raymerge.checkpoints.header import FileLayout, StoredTensor
from raymerge.checkpoints.quantisation.encoding import part_name
from raymerge.checkpoints.source import in_natural_order
from raymerge.errors import Findings, Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.dispositions import Disposition, Fate, Fates, Rule
from raymerge.merge_plan.expressions import Output
from raymerge.merge_plan.plan import FORMAT, Plan, encoding_to_json, expression_to_json, make_plan
from raymerge.merge_plan.segments import cut_segments, place_rows, place_shards
from raymerge.merge_plan.tables import make_tables
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.sources import Source, fingerprint, holdings
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.outputs.embeddings_and_heads import TieDecision
from raymerge.planner.tokenizer.files import TokenizerChanges
from raymerge.recipes import AnyRecipe, canonical


def stored_outputs(outputs: Sequence[Output]) -> tuple[Output, ...]:
    return tuple(each for output in outputs for each in _stored(output))


def stored_fates(fates: Fates, outputs: Sequence[Output]) -> Iterable[tuple[int, str, Fate]]:
    """The disposition of every source tensor, with the stored output that is made of it.

    Of an output of codes with scales that is the part of the tensor's kind, or else the codes.
    """
    packed = {output.name: output for output in outputs if output.packed is not None}
    if not packed:
        return fates.rows()
    names = {name: [each.name for each in _stored(output)] for name, output in packed.items()}

    def stored_fate(source: int, name: str, fate: Fate) -> Fate:
        stored = names.get(fate.output)
        if stored is None:
            return fate
        alike = part_name(fates.whole(source, name), name, fate.output)
        return fate._replace(output=alike if alike in stored else stored[0])

    return ((source, name, stored_fate(source, name, fate)) for source, name, fate in fates.rows())


def _stored(output: Output) -> Iterator[Output]:
    packed = output.packed
    if packed is None:
        yield output
        return
    # That numbers are finite is seen before they are encoded: codes of four bits could not tell.
    packing = packed.packing
    yield Output(
        packed.codes, packing.format.code_dtype, packing.codes_shape, output.rows, False, joined=packed.joined
    )
    if packed.scales:
        shape = packing.scales_shape
        yield Output(packed.scales, packing.scale_dtype, shape, (), False, scales_of=packed.codes)
    if packed.tensor_scale is not None:
        yield Output(*packed.tensor_scale, (), False, scales_of=packed.codes, is_tensor_scale=True)
    yield from packed.others


class Unused(NamedTuple):
    store: int
    source: int
    """Its model, for an adapter's tensor that below it; ``store`` for a stage's."""
    name: str


Unplaced = tuple[str, str]
"""Problem of tensors without a place in the output, with ``{count}``, and the remedy."""


def settle_unused(
    resolver: InputResolver,
    fates: Fates,
    findings: Findings,
    rule_of: Callable[[Unused], Rule | Unplaced | None],
) -> None:
    """Give every unused tensor the rule by which it is left out, or report it.

    None of ``rule_of``: it is reported elsewhere.
    """
    models = {laid.store: index for index, laid in resolver.adapters.items()}
    for store, name in list(fates.unsettled()):
        source = models.get(store, store)
        changed = name if source == store else resolver.adapters[source].changed_by(name) or ""
        found = rule_of(Unused(store, source, changed))
        if isinstance(found, Rule):
            fates.settle(store, name, Fate(Disposition.DROPPED, found))
        elif found is not None:
            where = resolver.sources[source].name
            what, remedy = found
            findings.tensor(("unused", where), where=where, what=what, remedy=remedy, example=name)


_KEPT = "head and embedding are kept as they are"


@dataclass(frozen=True, slots=True)
class Decided:
    recipe: AnyRecipe
    sources: tuple[Source, ...]
    donor: int
    method: str
    outputs: tuple[Output, ...]
    fates: Fates
    findings: Findings
    config: Mapping[str, Any]
    notes: tuple[str, ...]
    rules: tuple[str, ...] = ()
    tie: TieDecision = field(default_factory=lambda: TieDecision("", "", None, _KEPT))
    tokenizer: TokenizerChanges = field(default_factory=TokenizerChanges)


def finish_plan(decided: Decided, *, version: str) -> Plan:
    plan = _tabled(decided, version)
    # It takes more memory than the tables, and checking them takes some too.
    del decided
    return _proved(plan)


def _tabled(decided: Decided, version: str) -> Plan:
    recipe, findings, tie = decided.recipe, decided.findings, decided.tie
    outputs = stored_outputs(decided.outputs)
    donor = decided.sources[decided.donor]
    shards = place_shards(outputs, recipe.shard_size, donor.checkpoint.stored)
    for problem in _disagreements(shards, decided.config, donor) if findings.is_empty else ():
        findings.add(problem)
    rows = place_rows(outputs, shards)
    tables, expressions, encodings = make_tables(
        outputs,
        shards,
        rows,
        cut_segments(rows),
        stored_fates(decided.fates, decided.outputs),
        decided.tokenizer.files,
    )
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "raymerge": version,
        "recipe": json.loads(canonical(recipe)),
        "recipe_text": recipe.text,
        "method": decided.method,
        "rules": list(decided.rules),
        "seed": recipe.seed,
        "duplicates": recipe.duplicates,
        "sources": [fingerprint(holding) for holding in holdings(decided.sources)],
        "donor": decided.donor,
        "expressions": [expression_to_json(expression) for expression in expressions],
        "encodings": [encoding_to_json(encoding) for encoding in encodings],
        "config": dict(decided.config),
        "left_out": list(decided.tokenizer.left_out),
        "tie": {"head": tie.head, "embedding": tie.embedding, "tied": tie.tied, "reason": tie.reason},
        "notes": [*recipe.notes, *decided.notes],
    }
    return make_plan(manifest, tables, findings.problems())


def _disagreements(
    shards: Sequence[tuple[str, FileLayout]], config: Mapping[str, Any], donor: Source
) -> Iterator[Problem]:
    tensors = {
        tensor.name: StoredTensor(tensor.name, tensor.dtype, tensor.shape, key, tensor.offset, tensor.nbytes)
        for key, layout in shards
        for tensor in layout.tensors
    }
    ordered = {name: tensors[name] for name in in_natural_order(tensors, donor.checkpoint.stored)}
    written = replace(donor.checkpoint, config=config, tensors=ordered, shapes={})
    yield from config_problems(written)


def _proved(plan: Plan) -> Plan:
    problems = check_plan(plan)
    if problems:
        raise RuntimeError("raymerge made a plan that contradicts itself:\n" + "\n".join(map(str, problems)))
    return plan
