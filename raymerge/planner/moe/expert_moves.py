"""What each expert of the output is made of, layer by layer: a renumbered, a merged or an added expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymerge.architectures.expert_fields import ExpertFields, expert_fields
from raymerge.errors import Problem
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import Path_
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.planner.moe.saliency import Scores
from raymerge.recipes import AddedExpert, ExpertSetRecipe


@dataclass(frozen=True, slots=True)
class Origin:
    """One expert that is there already."""

    source: int
    """Index of the model."""
    expert: int | None
    """Its number there; None for the feed-forward layer of a dense model."""


@dataclass(frozen=True, slots=True)
class NewExpert:
    """One expert of the output."""

    origins: tuple[Origin, ...]
    """What it is the mean of; one that stands alone is kept as it is."""
    weights: tuple[float, ...]
    """How much each counts, in any unit."""
    row_of: int | None = None
    """The base's expert whose router row and biases it gets; None for those of its origins."""

    @property
    def rows(self) -> tuple[Origin, ...]:
        """What its router row is the mean of."""
        return self.origins if self.row_of is None else (Origin(0, self.row_of),)


Moves = Mapping[str, tuple[NewExpert, ...]]
"""The experts of the output, by the path of their block."""


class Mover:
    """Finds the experts that a recipe asks for; what it cannot ask for becomes a finding."""

    def __init__(
        self,
        recipe: ExpertSetRecipe,
        sources: Sequence[Source],
        blocks: Sequence[ExpertBlock],
        findings: Findings,
    ) -> None:
        self._recipe = recipe
        self._change = recipe.experts
        self._sources = sources
        self._blocks = blocks
        self._findings = findings
        self._fields = [expert_fields(source.checkpoint.config, source.rules) for source in sources]

    def check(self) -> None:
        """Find what is wrong with the recipe's numbers, before anything is read."""
        for path, ids in self._named():
            self._check_ids(path, ids, self._blocks[0].num_experts, self._sources[0].name)
        for key in ("keep", "merge"):
            self._check_layers(key)
        if self._change.merge is not None:
            self._check_cover()
        if self._change.drop is not None:
            self._check_drop(self._change.drop)
        for index, added in enumerate(self._change.add):
            self._check_added(index, added)
        if self._findings.is_empty:
            self._check_count()

    def num_experts(self) -> int:
        """Experts that each layer of the output has."""
        change, before = self._change, self._blocks[0].num_experts
        if change.keep is not None:
            return change.keep.num_experts
        if change.merge is not None:
            return change.merge.num_experts
        if change.drop is not None:
            return before - change.drop
        return before + sum(len(self._origins(added)) for added in change.add)

    def moves(self, scores: Scores | None) -> Moves:
        """The experts of every block. ``scores`` are there where the recipe names some."""
        return {block.path: tuple(self._of(block, scores)) for block in self._blocks}

    def _of(self, block: ExpertBlock, scores: Scores | None) -> Iterator[NewExpert]:
        change = self._change
        if change.keep is not None:
            yield from (_alone(expert) for expert in change.keep.at(block.layer) or ())
        elif change.drop is not None and scores is not None:
            yield from (_alone(expert) for expert in self._kept(block, scores[block.path], change.drop))
        elif change.merge is not None:
            for group in change.merge.at(block.layer) or ():
                yield NewExpert(
                    tuple(Origin(0, expert) for expert in group), self._weights(block, scores, group)
                )
        else:
            yield from (_alone(expert) for expert in range(block.num_experts))
            for added in change.add:
                yield from (NewExpert((each,), (1.0,), added.row_of) for each in self._origins(added))

    def _weights(self, block: ExpertBlock, scores: Scores | None, group: Sequence[int]) -> tuple[float, ...]:
        """How much each expert of a group counts; one alone stays what it is, whatever its score."""
        if scores is None or len(group) == 1:
            return (1.0,) * len(group)
        weights = tuple(scores[block.path][expert] for expert in group)
        if min(weights) < 0:
            what = f"experts {_listed(group)} in layer {block.layer} have scores down to {min(weights):g}."
            self._say(("experts", "scores"), what, "Weights of a mean cannot be negative.")
        elif not any(weights):
            what = f"the scores of experts {_listed(group)} in layer {block.layer} are all 0."
            self._say(("experts", "scores"), what, "A weighted mean needs a weight above 0 in each group.")
        return weights

    def _kept(self, block: ExpertBlock, scores: Sequence[float], drop: int) -> list[int]:
        """Experts that are left when those with the lowest scores go, of each group as many.

        Of equal scores, the expert with the higher number goes.
        """
        groups = self._num_groups()
        size = block.num_experts // groups
        gone: set[int] = set()
        for group in range(groups):
            members = range(group * size, (group + 1) * size)
            gone |= set(sorted(members, key=lambda expert: (scores[expert], -expert))[: drop // groups])
        return [expert for expert in range(block.num_experts) if expert not in gone]

    def _num_groups(self) -> int:
        fields = self._fields[0]
        return fields.num_groups if fields is not None else 1

    def _origins(self, added: AddedExpert) -> tuple[Origin, ...]:
        source = self._source(added)
        fields = self._fields[source]
        if fields is None:
            return (Origin(source, None),)
        listed = range(fields.count.value) if added.experts is None else added.experts
        return tuple(Origin(source, expert) for expert in listed)

    def _source(self, added: AddedExpert) -> int:
        return next(source.index for source in self._sources if source.reference == added.model)

    def _named(self) -> Iterator[tuple[Path_, tuple[int, ...]]]:
        """Every list of the base's experts in the recipe, with its place."""
        change = self._change
        if change.keep is not None:
            if change.keep.everywhere is not None:
                yield ("experts", "keep"), change.keep.everywhere
            for layer, ids in change.keep.by_layer:
                yield ("experts", "keep", str(layer)), ids
        if change.merge is not None:
            for path, groups in _groups(self._recipe):
                yield from (((*path, number), ids) for number, ids in enumerate(groups))
        for index, added in enumerate(change.add):
            if added.row_of is not None:
                yield ("experts", "add", index, "row_of"), (added.row_of,)
        if isinstance(change.dense, int):
            yield ("experts", "dense"), (change.dense,)
        if change.of is not None:
            yield ("experts", "of"), change.of

    def _check_ids(self, path: Path_, ids: Sequence[int], count: int, name: str) -> None:
        strange = [expert for expert in ids if expert >= count]
        if strange:
            what = f"there is no expert {_listed(strange)}: {name} has {count}, from 0 to {count - 1}."
            self._say(path, what, "Name experts that are there.")

    def _check_layers(self, key: str) -> None:
        """Lists layer by layer name every layer with experts, and no other."""
        lists = getattr(self._change, key)
        if lists is None or lists.everywhere is not None:
            return
        wanted = {block.layer for block in self._blocks}
        given = {layer for layer, _ in lists.by_layer}
        if wanted - given:
            what = f"these layers have experts too, and no list here: {_listed(sorted(wanted - given))}."
            remedy = (
                "Name every layer that has experts; multi-token-prediction layers count after all others."
            )
            self._say(("experts", key), what, remedy)
        if given - wanted:
            what = f"these layers have no experts: {_listed(sorted(given - wanted))}."
            self._say(("experts", key), what, "Remove them.")

    def _check_cover(self) -> None:
        count = self._blocks[0].num_experts
        for path, groups in _groups(self._recipe):
            named = {expert for group in groups for expert in group}
            absent = [expert for expert in range(count) if expert not in named]
            if absent:
                what = f"these experts are in no group: {_listed(absent)}."
                self._say(path, what, "Put every expert into one group; one of its own keeps it as it is.")

    def _check_drop(self, drop: int) -> None:
        count, groups = self._blocks[0].num_experts, self._num_groups()
        if drop >= count:
            what = f"{drop} experts are to go, and there are {count} in each layer."
            self._say(("experts", "drop"), what, "Leave at least one.")
        elif drop % groups:
            below, above = drop - drop % groups, drop - drop % groups + groups
            numbers = " or ".join(str(n) for n in (below, above) if 0 < n < count)
            what = f"experts are chosen by {groups} groups, and {drop} cannot be taken from all alike."
            self._say(("experts", "drop"), what, f"Drop {numbers}." if numbers else "Use 'keep'.")

    def _check_added(self, index: int, added: AddedExpert) -> None:
        path: Path_ = ("experts", "add", index)
        source = self._sources[self._source(added)]
        fields = self._fields[source.index]
        if fields is None and added.row_of is None:
            what = f"{source.name} is a dense model, which has no router row for its expert."
            remedy = "Add 'row_of: N', the expert of base_model that it is to share its tokens with."
            self._say((*path, "model"), what, remedy)
        if fields is None and added.experts is not None:
            what = f"{source.name} is a dense model: its feed-forward layers are one expert."
            self._say((*path, "experts"), what, "Remove 'experts'.")
        if fields is not None and added.experts is not None:
            self._check_ids((*path, "experts"), added.experts, fields.count.value, source.name)

    def _check_count(self) -> None:
        """The number of experts that is left has to fit the config."""
        fields = self._fields[0]
        if fields is None or self._change.dense is not None:
            return
        count, by_pairs = self.num_experts(), any(block.has_selection_bias for block in self._blocks)
        for sentence in fields.objections(count, by_pairs=by_pairs):
            self._say(("experts",), sentence, _remedy(fields, count, by_pairs=by_pairs))

    def _say(self, path: Path_, what: str, remedy: str) -> None:
        self._findings.add(Problem(self._recipe.where(*path), what, remedy))


def regrouped(moves: Moves, blocks: Sequence[ExpertBlock], num_groups: int) -> list[int]:
    """Layers in which an expert leaves the group that the router knew it in."""
    if num_groups < 2:
        return []
    return [
        block.layer
        for block in blocks
        for new in (moves[block.path],)
        if any(
            origin.source == 0
            and origin.expert is not None
            and origin.expert * num_groups // block.num_experts != number * num_groups // len(new)
            for number, expert in enumerate(new)
            for origin in expert.origins
        )
    ]


def _alone(expert: int) -> NewExpert:
    return NewExpert((Origin(0, expert),), (1.0,))


def _groups(recipe: ExpertSetRecipe) -> Iterator[tuple[Path_, tuple[tuple[int, ...], ...]]]:
    merge = recipe.experts.merge
    if merge is None:
        return
    if merge.everywhere is not None:
        yield ("experts", "merge"), merge.everywhere
    for layer, groups in merge.by_layer:
        yield ("experts", "merge", str(layer)), groups


def _remedy(fields: ExpertFields, count: int, *, by_pairs: bool) -> str:
    numbers = " or ".join(map(str, fields.nearest(count, by_pairs=by_pairs)))
    return f"Numbers of experts that work: {numbers}." if numbers else "Use another checkpoint."


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
