"""Builds the plan of a recipe that changes the experts of one checkpoint, or makes a dense model of it.

Makes the output tensors that change with the experts, in the layout of the checkpoint they belong to.

Where an expert stays what it is and lies as it will lie, its bytes are copied, whatever they mean: codes and
scales of quantised experts too. Only where experts become one, or lie otherwise in the model that they come
from, or an adapter adds to them, are their matrices looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from raymerge.architectures import Role, logical_name
from raymerge.architectures.expert_fields import (
    DenseCounterpart,
    dense_config,
    dense_counterparts,
    dense_objections,
    expert_fields,
    expert_meaning,
    with_expert_count,
    with_expert_names,
)
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import config_name
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.dispositions import Rule
from raymerge.merge_plan.expressions import Assembly, Output, Part, Read, Row, assembled
from raymerge.planner.config.config import output_config
from raymerge.planner.config.quantised import config_of_copies
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.consistency import declared_dtype
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.compatibility import adapter_notes
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import Block, LogicalTensors, open_logical
from raymerge.planner.moe.dense_target import SHARED_FACTOR, dense_outputs, dense_width, settle_routers
from raymerge.planner.moe.expert_blocks import ExpertBlock, Kind, Numbered, Stacked, expert_blocks
from raymerge.planner.moe.expert_inputs import BASE, ExpertInputs, marked, renumbered
from raymerge.planner.moe.expert_moves import Mover, Moves, NewExpert, Origin, read_scores, regrouped
from raymerge.planner.moe.expert_rows import Share, fate_of, matrix_row, mean_expression, share_row
from raymerge.planner.outputs.finish import Decided, Unplaced, Unused, settle_unused
from raymerge.recipes import AddedExpert, ExpertSetRecipe


class ExpertOutputs:
    def __init__(self, inputs: ExpertInputs) -> None:
        self._inputs = inputs

    def outputs(self, block: ExpertBlock, experts: Sequence[NewExpert]) -> Iterator[Output]:
        """All outputs of a block: matrices of experts, and what belongs to them in the router.

        One that cannot be made is left out, with a finding.
        """
        for stacked in block.stacked:
            work = _Work(self._inputs, block, stacked, stacked.tensor)
            rows = self._stacked(work, experts)
            shape, name = stacked.shape(len(experts)), stacked.tensor.name
            if rows is not None:
                yield Output(name, work.dtype, shape, rows, work.dtype.is_mergeable)
        for numbered in block.numbered:
            yield from self._numbered(block, numbered, experts)

    def _numbered(
        self, block: ExpertBlock, numbered: Numbered, experts: Sequence[NewExpert]
    ) -> Iterator[Output]:
        """A tensor for each expert, in the dtype of its own; where only some have one, for those."""
        is_complete = len(numbered.tensors) == block.num_experts
        for number, expert in enumerate(experts):
            if not is_complete and not any(self._has(numbered, origin) for origin in expert.origins):
                continue
            work = _Work(self._inputs, block, numbered, self._like(numbered, expert.origins[0]))
            found = work.alone(expert)
            rows = work.combined(expert, number) if found is None else work.unchanged([found], number)
            if rows is not None:
                dtype = work.dtype
                yield Output(numbered.name(number), dtype, numbered.share, rows, dtype.is_mergeable)

    def _has(self, kind: Numbered, origin: Origin) -> bool:
        if origin.source == BASE:
            return origin.expert in kind.tensors
        return self._inputs.share(kind, origin) is not None

    def _like(self, kind: Numbered, origin: Origin) -> StoredTensor:
        """The tensor of the base whose dtype an expert is written in: its own, or the first of that dtype."""
        own = kind.tensors.get(origin.expert) if origin.expert is not None else None
        if origin.source == BASE and own is not None:
            return own
        share = self._inputs.share(kind, origin)
        same = (each for each in kind.tensors.values() if share and each.dtype is share.tensor.dtype)
        return next(same, kind.tensors[kind.first])

    def _stacked(self, work: _Work, experts: Sequence[NewExpert]) -> tuple[Row, ...] | None:
        """The rows of a tensor with a share for each expert; shares that lie together become one row."""
        made: list[tuple[Row, ...] | None] = []
        waiting: list[Share] = []
        for number, expert in enumerate(experts):
            found = work.alone(expert)
            if waiting and (found is None or waiting[-1].joined(found) is None):
                made.append(work.unchanged(waiting, number))
                waiting = []
            if found is None:
                made.append(work.combined(expert, number))
            else:
                waiting.append(found)
        if waiting:
            made.append(work.unchanged(waiting, len(experts)))
        rows = tuple(row for each in made if each is not None for row in each)
        return rows if None not in made else None


class _Work:
    """One kind of tensor of one block, written in the dtype of ``like``, a tensor of the base."""

    def __init__(self, inputs: ExpertInputs, block: ExpertBlock, kind: Kind, like: StoredTensor) -> None:
        self._inputs = inputs
        self._block = block
        self._kind = kind
        self._like = like
        self.dtype = inputs.dtype_of(like, kind.part)

    def alone(self, expert: NewExpert) -> Share | None:
        """What an expert that is not merged has, where it has it stored as the base has it; else None."""
        origins = self._origins(expert)
        return self._inputs.share(self._kind, origins[0]) if len(origins) == 1 else None

    def unchanged(self, shares: Sequence[Share], number: int) -> tuple[Row, ...] | None:
        """One row of shares that lie one behind the other, the last of which is of expert ``number - 1``."""
        first = shares[0]
        if first.tensor.dtype is not self.dtype and not self._is_plain():
            return None
        if not self._inputs.may_write(first, self.dtype):
            return None
        whole = replace(first, num_elements=sum(share.num_elements for share in shares))
        shape = (len(shares), *self._kind.share) if isinstance(self._kind, Stacked) else self._kind.share
        row, fate = share_row(whole, shape, self._kind.name(number), self.dtype)
        self._inputs.fates.settle(first.source, first.tensor.name, fate)
        return (row,)

    def combined(self, expert: NewExpert, number: int) -> tuple[Row, ...] | None:
        """The rows of an expert that takes some arithmetic; None with findings."""
        if not self._is_plain():
            return None
        shares = [self._inputs.share(self._kind, origin) for origin in self._origins(expert)]
        if None not in shares:
            return self._mean_of_shares(expert, number, [share for share in shares if share is not None])
        if isinstance(self._kind, Stacked) and self._kind.is_router:
            return self._router_row(expert, self._kind)
        own = self._kind.name(self._kind.first)
        blocks = self._inputs.logical.blocks(own)
        if blocks is None:
            self._inputs.unknown_layout(own)
            return None
        mark = marked(self._kind.first)
        rows = [self._matrices(expert, number, each) for each in blocks if mark in each.members[0][0]]
        found = tuple(row for row in rows if row is not None)
        return found if len(found) == len(rows) else None

    def _is_plain(self) -> bool:
        """Whether the base has numbers here, so that numbers may be written; else a finding says so."""
        return self._inputs.is_plain(self._like)

    def _origins(self, expert: NewExpert) -> Sequence[Origin]:
        return expert.rows if self._kind.is_router else expert.origins

    def _weights(self, expert: NewExpert) -> Sequence[float]:
        return (1.0,) if len(self._origins(expert)) == 1 else expert.weights

    def _mean_of_shares(
        self, expert: NewExpert, number: int, shares: Sequence[Share]
    ) -> tuple[Row, ...] | None:
        """The mean of what several experts have, element by element: all of them are stored alike."""
        name = self._kind.name(number)
        plain = [self._inputs.plain.check(share.source, share.tensor) for share in shares]
        if not all(plain):
            return None
        for share in shares:
            self._inputs.fates.settle(share.source, share.tensor.name, fate_of(len(shares), name))
        expression = mean_expression(self._weights(expert), self.dtype)
        shape = self._kind.share or (1,)
        return (matrix_row([share.read() for share in shares], shape, f"{name}#{number}", expression),)

    def _matrices(self, expert: NewExpert, number: int, place: Block) -> Row | None:
        """A run of an expert's matrices, laid as the base lays expert 0's, each found by its name."""
        parts: list[Part] = []
        reads: list[Read] = []
        complete = True
        fate = fate_of(len(expert.origins), self._kind.name(number))
        for called, inside in place.members:
            logical = renumbered(called, 0, of=self._kind.first)
            for origin in expert.origins:
                found = self._inputs.matrix(self._block, origin, logical)
                if found is None or not self._inputs.fits(origin.source, found, inside.shape, logical):
                    complete = False
                    continue
                self._inputs.settle(found, origin.source, fate)
                reads.append(found.read(len(parts)))
            parts.append(Part(renumbered(logical, number), inside.shape, inside.view))
        if not complete:
            return None
        expression = mean_expression(expert.weights, self.dtype)
        return Row(place.num_elements, expression, tuple(parts), tuple(reads))

    def _router_row(self, expert: NewExpert, stacked: Stacked) -> tuple[Row, ...] | None:
        """One expert's row in a router, or its element of a bias, found by the router's canonical name."""
        logical = logical_name(stacked.tensor.name, self._inputs.base.rules)
        origins = expert.rows
        found = [self._row_of(stacked, origin, logical, len(origins)) for origin in origins]
        reads = [read for read in found if read is not None]
        if len(reads) < len(found):
            return None
        expression = mean_expression(self._weights(expert), self.dtype)
        return (matrix_row(reads, (1, *stacked.share), f"{logical}#{expert.row_of}", expression),)

    def _row_of(self, stacked: Stacked, origin: Origin, logical: str, count: int) -> Read | None:
        found = self._inputs.named(origin.source, logical)
        if found is None or origin.expert is None:
            self._no_row(origin.source, logical)
            return None
        held = self._inputs.num_experts(origin.source)
        if not self._inputs.fits(origin.source, found, stacked.shape(held), logical):
            return None
        self._inputs.settle(found, origin.source, fate_of(count, stacked.tensor.name))
        # A bias that lies as [1, experts] is taken element by element as well.
        term = replace(found.term(), num_rows=held)
        return assembled(0, Assembly(1, prod(stacked.share), (term,), ((0, origin.expert, 1, 0),), 1))

    def _no_row(self, source: int, logical: str) -> None:
        self._inputs.findings.tensor(
            ("no row", str(source)),
            where=self._inputs.name(source),
            what="it lacks {count} tensors that the router has a row of for each expert",
            remedy="Add 'row_of: N' to copy router rows and biases of an expert of base_model.",
            example=logical,
        )


_BASE = 0


class AddedModels:
    """The models that a recipe adds experts of, beside its base; what is wrong becomes a finding."""

    def __init__(
        self,
        recipe: ExpertSetRecipe,
        resolver: InputResolver,
        blocks: Sequence[ExpertBlock],
        findings: Findings,
    ) -> None:
        self._recipe = recipe
        self._resolver = resolver
        self._sources = resolver.sources
        self._findings = findings
        self._layers = frozenset(block.name_layer for block in blocks if not block.is_mtp)
        self._dense_layers = self._layers_with(_BASE, Role.MLP) - self._layers
        self._fields = [expert_fields(each.checkpoint.config, each.rules) for each in resolver.sources]

    def check(self) -> None:
        """Find what speaks against the models by their configs and the names of their tensors."""
        for index, added in enumerate(self._recipe.experts.add):
            source = self._source(added)
            problems = [*self._other_meanings(source, added), *self._other_layers(source)]
            for what, remedy in problems if source != _BASE else ():
                place = self._recipe.where("experts", "add", index, "model")
                self._findings.add(Problem(place, what, remedy))

    def notes(self) -> Iterator[str]:
        """What is worth telling of them."""
        base = self._sources[_BASE].name
        for source in dict.fromkeys(self._source(added) for added in self._recipe.experts.add):
            name, mine, theirs = self._sources[source].name, self._fields[_BASE], self._fields[source]
            if theirs is None and (kept := self._taken_from(source) & self._dense_layers):
                yield f"{base} keeps its feed-forward layers where it has no experts: {_listed(kept)}"
            chosen = [fields.chosen for fields in (mine, theirs) if fields is not None and fields.chosen]
            if len(chosen) == 2 and chosen[0].value != chosen[1].value:
                there, here = chosen[1].value, chosen[0].value
                yield f"{name} sends each token to {there} of its experts, the output to {here}"

    def is_left_behind(self, source: int, name: str) -> bool:
        """Whether a tensor that nothing was made of is of an expert that the recipe adds."""
        info = self._resolver.logical[source].infos[name]
        is_there = info.layer in self._layers and info.stack == self._stack(source)
        fields = self._fields[source]
        if fields is None or not is_there or info.part is not Role.EXPERT:
            return fields is None and is_there and info.part is Role.MLP
        chosen = (added.experts for added in self._recipe.experts.add if self._source(added) == source)
        return info.expert is None or any(each is None or info.expert in each for each in chosen)

    def _other_meanings(self, source: int, added: AddedExpert) -> Iterator[tuple[str, str]]:
        """What the configs say otherwise: what was found, and a remedy."""
        base, name = self._sources[_BASE].name, self._sources[source].name
        mine, theirs = (expert_meaning(self._sources[each].checkpoint.config) for each in (_BASE, source))
        if _differ(mine.activation, theirs.activation):
            what = f"the activation of {name} is {theirs.activation}, that of {base} is {mine.activation}."
            yield what, "All experts of a model have one activation."
        if self._fields[source] is None:
            return
        if added.row_of is None and _differ(mine.scoring, theirs.scoring):
            what = (
                f"the router of {name} makes weights of its scores by {theirs.scoring}, and that of {base} "
            )
            remedy = "Add 'row_of: N' to copy the row of an expert of base_model, or take another model."
            yield f"{what}by {mine.scoring}: rows of one mean nothing in the other.", remedy
        if _differ(mine.sums_to_one, theirs.sums_to_one):
            one, other = (name, base) if theirs.sums_to_one else (base, name)
            what = f"the weights of a token's experts sum to 1 in {one}, and in {other} they do not."
            yield (
                what,
                "Experts are as strong as their weights are small: take them of a model that is alike.",
            )
        if _differ(mine.factor, theirs.factor):
            what = f"{name} multiplies what its experts give by {theirs.factor:g}, and {base} by "
            yield f"{what}{mine.factor:g}.", "Take experts of a model with the same factor."

    def _other_layers(self, source: int) -> Iterator[tuple[str, str]]:
        """Layers of one model that the other has no counterpart of."""
        base, name = self._sources[_BASE].name, self._sources[source].name
        theirs, kind = self._taken_from(source), "experts"
        known = self._layers
        if self._fields[source] is None:
            kind, known = "feed-forward layers", known | self._dense_layers
        beyond, absent = theirs - known, self._layers - theirs
        if not beyond and not absent:
            return
        what = f"it has {kind} in {len(theirs)} layers, and {base} has experts in {len(self._layers)}"
        what += f"; there is no place for those of {_listed(beyond)}" if beyond else ""
        what += f"; there are none for {_listed(absent)}" if absent else ""
        remedy = "Add a model with the same layers; a merge of 'slices' before this one can cut it to them."
        yield f"{name}: {what}.", remedy

    def _taken_from(self, source: int) -> frozenset[int]:
        return self._layers_with(source, Role.MLP if self._fields[source] is None else Role.EXPERT)

    def _layers_with(self, source: int, part: Role) -> frozenset[int]:
        stack = self._stack(source)
        infos = self._resolver.logical[source].infos.values()
        return frozenset(
            info.layer
            for info in infos
            if info.part is part
            and info.stack == stack
            and info.layer is not None
            and info.role is not Role.MTP
        )

    def _stack(self, source: int) -> str | None:
        main = self._sources[source].layer_stack(None)
        return main.prefix if main is not None else None

    def _source(self, added: AddedExpert) -> int:
        return next(each.index for each in self._sources if each.reference == added.model)


def _differ(mine: object, theirs: object) -> bool:
    return None not in (mine, theirs) and mine != theirs


def _listed(layers: frozenset[int]) -> str:
    shown = f"layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, sorted(layers)[:8]))}"
    return f"{shown} and {len(layers) - 8} more" if len(layers) > 8 else shown


_METHODS = {
    "keep": "keep experts",
    "drop": "drop experts",
    "merge": "merge experts",
    "add": "add experts",
    "dense": "make dense",
}


def decide_expert_set(recipe: ExpertSetRecipe, sources: Sequence[Source]) -> Decided:
    """What the plan of other experts for a checkpoint consists of; the first source is its ``base_model``.

    Only headers are read, but for scores: those of a file, or of the experts' own weights.

    Raises:
        PlanError: the checkpoint's experts and what is asked of them fit so little that there is no plan to
            show.
    """
    return _Builder(recipe, sources).decided()


class _Builder:
    def __init__(self, recipe: ExpertSetRecipe, sources: Sequence[Source]) -> None:
        self._recipe = recipe
        self._sources = tuple(sources)
        self._base = sources[BASE]
        self._findings = Findings()
        logical = open_logical(sources, self._findings)
        self._resolver = InputResolver(sources, logical)
        for laid in self._resolver.adapters.values():
            for problem in laid.problems():
                self._findings.add(problem)
        self._blocks = self._found_blocks(logical[BASE])
        self._mover = Mover(recipe, sources, self._blocks, self._findings)
        self._mover.check()
        self._added = AddedModels(recipe, self._resolver, self._blocks, self._findings)
        self._added.check()
        self._require()
        self._work = ExpertInputs(self._resolver, recipe.dtype, self._findings)

    def decided(self) -> Decided:
        change = self._recipe.experts
        outputs, config, notes = self._dense() if change.dense is not None else self._sparse()
        return Decided(
            recipe=self._recipe,
            sources=self._sources,
            donor=BASE,
            method=next(text for key, text in _METHODS.items() if getattr(change, key) not in (None, ())),
            outputs=outputs,
            fates=self._work.fates,
            findings=self._findings,
            config=self._with_dtype(config_of_copies(config, outputs)),
            notes=(*self._notes(), *notes),
        )

    def _sparse(self) -> tuple[tuple[Output, ...], Mapping[str, Any], list[str]]:
        change = self._recipe.experts
        scores = read_scores(self._recipe, self._resolver, self._blocks) if change.scores else None
        moves = self._mover.moves(scores)
        self._require()
        maker = ExpertOutputs(self._work)
        changed = (each for block in self._blocks for each in maker.outputs(block, moves[block.path]))
        outputs = (*self._kept(), *changed)
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
        """The base's experts."""
        base = self._base
        fields = expert_fields(base.checkpoint.config, base.rules)
        count = fields.count.value if fields is not None else 0
        found = expert_blocks(base, logical, count, self._findings) if count else ()
        if not found:
            what = f"{base.name} has no experts that could be changed"
            what += "." if not count else ": no layer of its text model holds any."
            remedy = "Name a mixture of experts, whose config counts the experts of a layer."
            raise PlanError(Problem(self._recipe.where("base_model"), what, remedy))
        if with_expert_names(base.checkpoint.config, count, count) is None:
            what = (
                "its config's tables of quantisation single out experts by their numbers, which would change."
            )
            self._findings.add(Problem(base.name, what, "Use a checkpoint that is not quantised so."))
        self._require()
        return found

    def _require(self) -> None:
        if not self._findings.is_empty:
            raise PlanError(self._findings.problems())

    def _family(self) -> DenseCounterpart:
        """The dense family that the checkpoint becomes one of."""
        config, place = self._base.checkpoint.config, self._recipe.where("experts", "dense")
        families = dense_counterparts()
        family = families.get(str(config.get("model_type")))
        remedy = f"raymerge makes these dense: {', '.join(families)}."
        said = list(dense_objections(config))
        if family is None:
            said.append(
                f"no dense family has the attention and norms of model_type '{self._base.model_type}'."
            )
        if any(block.is_mtp for block in self._blocks):
            said.append("layers that predict further tokens have experts too, and dense families have none.")
        if said or family is None:
            raise PlanError([Problem(place, sentence, remedy) for sentence in said])
        return family

    def _check_dense_layers(self, width: int) -> None:
        """Layers without experts are as wide as the others become: the config has one number for all."""
        tensors = self._base.checkpoint.tensors
        for name, info in self._resolver.logical[BASE].infos.items():
            own = tensors[name].shape
            if info.part is Role.MLP and info.projection == "gate" and width and own[0] != width:
                what = f"{name} is {own[0]} wide, and the layers that had experts become {width} wide."
                remedy = "A dense config has one width for all layers; choose experts that add up to it."
                self._findings.add(Problem(self._recipe.where("experts", "dense"), what, remedy))
                return

    def _kept(self) -> Iterator[Output]:
        changed = {name for block in self._blocks for name in block.names()}
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
        settle_unused(self._resolver, self._work.fates, self._findings, rule_of)

    def _rule_of_unused(self, gone: Set[str], is_complete: bool, unused: Unused) -> Rule | Unplaced | None:
        """``gone``: what experts that take no part have of their own."""
        if unused.store == BASE and unused.name in gone:
            return Rule.EXPERT_NOT_KEPT
        # What adapters have goes with their models.
        is_added = 0 < unused.store < len(self._sources)
        if unused.store != BASE and not (is_added and self._added.is_left_behind(unused.store, unused.name)):
            return Rule.ONLY_EXPERTS_TAKEN
        if not is_complete:
            return None
        if unused.store == BASE:
            what = "{count} tensors have no place in the output"
            return what, "The experts of such a checkpoint cannot be changed so."
        what = f"{{count}} tensors of its experts have no place in those of {self._base.name}"
        return what, "Add experts that have the same matrices and biases."

    def _with_dtype(self, config: Mapping[str, Any]) -> dict[str, Any]:
        wanted = self._recipe.dtype
        main = wanted or main_dtype(self._base.checkpoint)
        said = None if config.get("quantization_config") else declared_dtype(config)
        differs = wanted is not None or said not in (None, config_name(main))
        return output_config(config, dtype=main if differs else None)

    def _notes(self) -> Iterator[str]:
        for source in self._sources:
            yield from (f"{source.name}: {note}" for note in source.checkpoint.notes)
        yield f"config, tokenizer and companion files come from {self._base.name}"
        yield from adapter_notes(self._resolver, self._work.fates)
        yield from self._added.notes()

    def _moved(self, moves: Moves) -> Iterator[str]:
        fields = expert_fields(self._base.checkpoint.config, self._base.rules)
        before, after = self._blocks[0].num_experts, self._mover.num_experts()
        yield f"{len(self._blocks)} layers have {after} experts each, where there were {before}"
        if self._recipe.experts.drop is not None:
            for block in self._blocks:
                used = _used(block, moves, self._recipe)
                gone = ", ".join(str(expert) for expert in range(before) if expert not in used)
                yield f"layer {block.layer}: left out for the lowest scores: {gone}"
        layers = regrouped(moves, self._blocks, fields.num_groups if fields is not None else 1)
        if layers:
            listed = ", ".join(map(str, layers))
            yield f"experts come into other groups than the router knew them in, in layers {listed}"


def _used(block: ExpertBlock, moves: Moves | None, recipe: ExpertSetRecipe) -> frozenset[int]:
    change = recipe.experts
    if moves is None:
        chosen = range(block.num_experts) if change.of is None else change.of
        return frozenset((change.dense,)) if isinstance(change.dense, int) else frozenset(chosen)
    origins = (origin for expert in moves[block.path] for origin in expert.origins)
    return frozenset(each.expert for each in origins if each.source == BASE and each.expert is not None)
