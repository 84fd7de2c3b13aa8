"""Plans a recipe that changes the experts of one checkpoint, or makes a dense model of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

from raymerge.architectures.expert_fields import (
    DenseCounterpart,
    dense_config,
    dense_counterparts,
    dense_objections,
    expert_fields,
    with_expert_count,
    with_expert_names,
)
from raymerge.architectures.rules import Role, config_int
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import main_dtype
from raymerge.errors import Findings, PlanError, Problem
from raymerge.merge_plan.dispositions import Disposition, Rule, Use
from raymerge.merge_plan.expressions import Output
from raymerge.planner.config import config_of_copies, output_config, stated_dtype
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.compatibility import adapter_notes
from raymerge.planner.matching.input_resolver import open_inputs
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, expert_blocks
from raymerge.planner.moe.expert_moves import (
    BASE,
    ExpertSelection,
    Moves,
    NewExpert,
    Report,
    dropping_risks,
    given_report,
    read_scores,
    regrouped,
)
from raymerge.planner.moe.expert_outputs import (
    SHARED_FACTOR,
    ExpertInputs,
    dense_outputs,
    dense_width,
    expert_outputs,
    settle_routers,
)
from raymerge.planner.outputs.build import Decided, Unplaced, Unused, settle_unused
from raymerge.planner.outputs.routing_tables import has_unknown_experts, renumbered
from raymerge.recipes.expert_set import ExpertSetRecipe

_METHODS = {
    "keep": "keep experts",
    "drop": "drop experts",
    "merge": "merge experts",
    "add": "add experts",
    "dense": "make dense",
}


def decide_expert_set(
    recipe: ExpertSetRecipe, sources: Sequence[Source], report: Report | None = None
) -> Decided:
    """Decide the plan of other experts for a checkpoint; the first source is its ``base_model``.

    Only headers are read, but for scores: those of a file, or of the experts' own weights. ``report``: of the
    stage that measures experts. Until there is one the plan has as many experts as it will have, but others:
    everything else of it is final.

    Raises:
        PlanError: checkpoint and recipe fit so little that there is no plan to show."""
    return _Builder(recipe, sources, report).decided()


class _Builder:
    def __init__(self, recipe: ExpertSetRecipe, sources: Sequence[Source], report: Report | None) -> None:
        self._recipe = recipe
        self._sources = tuple(sources)
        self._report = report or given_report(recipe, sources[BASE])
        self._base = sources[BASE]
        self._findings = Findings()
        self._resolver = open_inputs(sources, self._findings)
        self._blocks = self._found_blocks(self._resolver.logical[BASE])
        self._mover = ExpertSelection(recipe, self._resolver, self._blocks, self._findings)
        self._mover.check()
        self._require()
        self._work = ExpertInputs(self._resolver, recipe.dtype, self._findings)

    def decided(self) -> Decided:
        change = self._recipe.experts
        outputs, config, notes = self._dense() if change.dense is not None else self._sparse()
        config = config_of_copies(config, outputs)
        asked = self._recipe.dtype
        dtype = stated_dtype(config, asked or main_dtype(self._base.checkpoint), changed=asked is not None)
        return Decided(
            recipe=self._recipe,
            sources=self._sources,
            donor=BASE,
            method=next(text for key, text in _METHODS.items() if getattr(change, key) not in (None, ())),
            outputs=outputs,
            dispositions=self._work.dispositions,
            findings=self._findings,
            config=output_config(config, dtype=dtype),
            notes=(*self._notes(), *notes),
        )

    def _sparse(self) -> tuple[tuple[Output, ...], Mapping[str, Any], list[str]]:
        change = self._recipe.experts
        scores = None
        if change.scores:
            scores = read_scores(self._recipe, self._resolver, self._blocks, self._report)
        moves = self._mover.moves(scores)
        self._require()
        changed = (expert_outputs(self._work, block, moves[block.path]) for block in self._blocks)
        outputs = (*self._kept(), *self._tables(moves), *chain.from_iterable(changed))
        self._settle_rest(moves)
        config = self._base.checkpoint.config
        before, count = self._blocks[0].num_experts, self._mover.num_experts()
        config = with_expert_names(config, before, count) or config
        return outputs, with_expert_count(config, self._base.rules, count), list(self._moved(moves))

    def _dense(self) -> tuple[tuple[Output, ...], Mapping[str, Any], list[str]]:
        family = self._family()
        change = self._recipe.experts
        made = (each for block in self._blocks for each in dense_outputs(block, change, self._work))
        outputs = (*self._kept(), *made)
        for block in self._blocks:
            settle_routers(block, self._work)
        self._settle_rest(None)
        width = dense_width(self._blocks[0], change, self._work)
        self._check_dense_layers(width)
        notes = [f"becomes a dense model of the family {family.model_type}, {width} neurons wide"]
        if any(block.shared for block in self._blocks):
            notes.append(f"the gate of the shared expert cannot be kept: it counts {SHARED_FACTOR:g}")
        config = self._base.checkpoint.config
        config = with_expert_names(config, self._blocks[0].num_experts, 0) or config
        return outputs, dense_config(config, family, width=width), notes

    def _found_blocks(self, logical: LogicalTensors) -> tuple[ExpertBlock, ...]:
        base = self._base
        fields = expert_fields(base.checkpoint.config, base.rules)
        count = fields.count.value if fields is not None else 0
        blocks = expert_blocks(base, logical, count, self._findings) if count else ()
        if not blocks:
            what = f"{base.name} has no experts that could be changed"
            what += ": no layer of its text model holds any." if count else "."
            remedy = "Name a mixture of experts, whose config counts the experts of a layer."
            raise PlanError(Problem(self._recipe.where("base_model"), what, remedy))
        if with_expert_names(base.checkpoint.config, count, count) is None:
            what = "its config's tables of quantisation single out experts by their numbers, which would "
            self._findings.add(base.name, f"{what}change.", "Use a checkpoint that is not quantised so.")
        self._require()
        return blocks

    def _require(self) -> None:
        if not self._findings.is_empty:
            raise PlanError(self._findings.problems())

    def _family(self) -> DenseCounterpart:
        config, place = self._base.checkpoint.config, self._recipe.where("experts", "dense")
        families = dense_counterparts()
        family = families.get(str(config.get("model_type")))
        remedy = f"raymerge makes these dense: {', '.join(families)}."
        sentences = list(dense_objections(config))
        if family is None:
            sentences.append(
                f"no dense family has the attention and norms of model_type '{self._base.model_type}'."
            )
        if any(block.is_mtp for block in self._blocks):
            sentences.append(
                "layers that predict further tokens have experts too, and dense families have none."
            )
        if sentences or family is None:
            raise PlanError([Problem(place, sentence, remedy) for sentence in sentences])
        return family

    def _check_dense_layers(self, width: int) -> None:
        """Layers without experts are as wide as the others become: the config has one number for all."""
        tensors = self._base.checkpoint.tensors
        for name, info in self._resolver.logical[BASE].infos.items():
            own = tensors[name].shape
            if info.part is Role.MLP and info.projection == "gate" and width and own[0] != width:
                what = f"{name} is {own[0]} wide, and the layers that had experts become {width} wide."
                remedy = "A dense config has one width for all layers; choose experts that add up to it."
                self._findings.add(self._recipe.where("experts", "dense"), what, remedy)
                return

    def _tables(self, moves: Moves) -> Iterator[Output]:
        """Tables that name experts, with the new numbers of these."""
        for block in self._blocks:
            numbers = _new_numbers(block, moves[block.path])
            for table in block.tables:
                if numbers == [*range(block.num_experts)]:
                    yield from filter(None, [self._work.kept(table.name)])
                elif None in numbers or has_unknown_experts(self._base.checkpoint, table, block.num_experts):
                    self._report_table(table, is_kept=None not in numbers)
                else:
                    disposition = Disposition(Use.CONVERTED, Rule.RENUMBERED, table.name)
                    self._work.dispositions.settle(BASE, table.name, disposition)
                    yield renumbered(table, [number or 0 for number in numbers], BASE)

    def _report_table(self, table: StoredTensor, *, is_kept: bool) -> None:
        what, remedy = "name experts that are not there", "Use a complete checkpoint."
        if not is_kept:
            what = "give tokens experts that would be gone, and nothing tells which others are to take them"
            remedy = "Merge an expert into another one ('merge'), or keep all experts of these layers."
        self._findings.tensor(
            self._base.name,
            f"{{count}} tables {what}",
            remedy,
            example=f"{table.name} {table.dtype.value}{list(table.shape)}",
        )

    def _kept(self) -> Iterator[Output]:
        changed = {name for block in self._blocks for name in block.names()}
        changed |= {table.name for block in self._blocks for table in block.tables}
        if self._recipe.experts.dense is not None:
            changed |= {name for block in self._blocks for name in (*block.routers, *block.shared)}
        for name in self._base.checkpoint.tensors:
            output = self._work.kept(name) if name not in changed else None
            if output is not None:
                yield output

    def _settle_rest(self, moves: Moves | None) -> None:
        gone = {
            tensor.name
            for block in self._blocks
            for used in (_used(block, moves, self._recipe),)
            for numbered in block.numbered
            for expert, tensor in numbered.tensors.items()
            if expert not in used
        }
        rule_of = partial(self._rule_of_unused, gone, self._findings.is_empty)
        settle_unused(self._resolver, self._work.dispositions, self._findings, rule_of)

    def _rule_of_unused(self, gone: Set[str], is_complete: bool, unused: Unused) -> Rule | Unplaced | None:
        if unused.store == BASE and unused.name in gone:
            return Rule.EXPERT_NOT_KEPT
        # What adapters have goes with their models.
        is_added = 0 < unused.store < len(self._sources)
        if unused.store != BASE and not (is_added and self._mover.is_left_behind(unused.store, unused.name)):
            return Rule.ONLY_EXPERTS_TAKEN
        if not is_complete:
            return None
        if unused.store == BASE:
            what = "{count} tensors have no place in the output"
            return what, "The experts of such a checkpoint cannot be changed so."
        what = f"{{count}} tensors of its experts have no place in those of {self._base.name}"
        return what, "Add experts that have the same matrices and biases."

    def _notes(self) -> Iterator[str]:
        for source in self._sources:
            yield from (f"{source.name}: {note}" for note in source.checkpoint.notes)
        yield f"config, tokenizer and companion files come from {self._base.name}"
        yield from adapter_notes(self._resolver, self._work.dispositions)
        yield from self._mover.notes()

    def _moved(self, moves: Moves) -> Iterator[str]:
        before, after = self._blocks[0].num_experts, self._mover.num_experts()
        yield f"{len(self._blocks)} layers have {after} experts each, where there were {before}"
        own = config_int(self._base.checkpoint.config, self._base.rules.sizes["mtp_experts"])
        if own is not None:
            yield f"layers that predict further tokens keep experts of their own, {own} each"
        drop = self._recipe.experts.drop
        if self._recipe.is_measured and self._report is None:
            yield "which experts these are follows once the model has been run on the texts"
        elif drop is not None:
            risks = dropping_risks(self._report, drop)
            for block in self._blocks:
                used = _used(block, moves, self._recipe)
                gone = ", ".join(str(expert) for expert in range(before) if expert not in used)
                risk = risks.get(block.layer, "")
                yield f"layer {block.layer}: left out for the lowest scores: {gone}{risk}"
        layers = regrouped(moves, self._blocks, self._mover.num_groups())
        if layers:
            listed = ", ".join(map(str, layers))
            yield f"experts come into other groups than the router knew them in, in layers {listed}"


def _new_numbers(block: ExpertBlock, experts: Sequence[NewExpert]) -> list[int | None]:
    """The new number of each expert, the first one if it is in several; None for one that is left out."""
    numbers: list[int | None] = [None] * block.num_experts
    for number, expert in reversed([*enumerate(experts)]):
        for origin in expert.origins:
            if origin.source == BASE and origin.expert is not None:
                numbers[origin.expert] = number
    return numbers


def _used(block: ExpertBlock, moves: Moves | None, recipe: ExpertSetRecipe) -> frozenset[int]:
    change = recipe.experts
    if moves is None:
        chosen = range(block.num_experts) if change.of is None else change.of
        return frozenset((change.dense,)) if isinstance(change.dense, int) else frozenset(chosen)
    origins = (origin for expert in moves[block.path] for origin in expert.origins)
    return frozenset(each.expert for each in origins if each.source == BASE and each.expert is not None)
