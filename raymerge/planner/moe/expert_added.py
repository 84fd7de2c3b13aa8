"""Models whose experts are added: whether these mean what they meant, and whether any is left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.architectures import Role
from raymerge.architectures.expert_fields import expert_fields
from raymerge.architectures.expert_meaning import expert_meaning
from raymerge.errors import Problem
from raymerge.planner.findings import Findings
from raymerge.planner.matching.input_resolver import Supplies
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.recipes import AddedExpert, ExpertSetRecipe

_BASE = 0


class AddedModels:
    """The models that a recipe adds experts of, beside its base; what is wrong becomes a finding."""

    def __init__(
        self,
        recipe: ExpertSetRecipe,
        supplies: Supplies,
        blocks: Sequence[ExpertBlock],
        findings: Findings,
    ) -> None:
        self._recipe = recipe
        self._supplies = supplies
        self._sources = supplies.sources
        self._findings = findings
        self._layers = frozenset(block.name_layer for block in blocks if not block.is_mtp)
        self._dense_layers = self._layers_with(_BASE, Role.MLP) - self._layers
        self._fields = [expert_fields(each.checkpoint.config, each.rules) for each in supplies.sources]

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
        info = self._supplies.logical[source].infos[name]
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
        """The layers of a model with something that becomes an expert."""
        return self._layers_with(source, Role.MLP if self._fields[source] is None else Role.EXPERT)

    def _layers_with(self, source: int, part: Role) -> frozenset[int]:
        """Layers of the text decoder in which a model has tensors of a kind."""
        stack = self._stack(source)
        infos = self._supplies.logical[source].infos.values()
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
    """Whether both are told and are not the same."""
    return None not in (mine, theirs) and mine != theirs


def _listed(layers: frozenset[int]) -> str:
    """The numbers of some layers in words."""
    shown = f"layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, sorted(layers)[:8]))}"
    return f"{shown} and {len(layers) - 8} more" if len(layers) > 8 else shown
