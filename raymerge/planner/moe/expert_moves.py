"""Which experts stay, are added and are merged, by number or by an importance score."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from raymerge.architectures.expert_fields import ExpertFields, expert_fields, expert_meaning
from raymerge.architectures.rules import Role
from raymerge.checkpoints.json_files import parse_strict_json
from raymerge.checkpoints.source import open_tensor_file
from raymerge.deferred import torch
from raymerge.documents.fields import FieldPath
from raymerge.errors import CheckpointError, Findings, PlanError, Problem, UserError, shortlist
from raymerge.merge_plan.elements import torch_dtype
from raymerge.planner.calibration import given_statistics, statistics_record
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.recipes.expert_set import AddedExpert, ExpertGroups, ExpertSetRecipe

LayerScores = tuple[float, ...]

HOW_TO_WRITE = (
    'Write {"LAYER": [one number for each expert]} as JSON, or one such tensor a layer as safetensors.'
)

_MAX_NBYTES = 64 * 2**20
_SHOWN = 5


def file_scores(given: str, blocks: Sequence[ExpertBlock]) -> Mapping[str, LayerScores]:
    try:
        path = _path(given)
        listed = _tensors(path) if path.suffix == ".safetensors" else _parsed(path)
    except OSError as error:
        what = f"cannot be read ({error.strerror or error})."
        raise PlanError(
            Problem(given, what, "Mend its rights or its place, or give another file.")
        ) from error
    layers = {key: block for block in blocks for key in (str(block.layer), block.path, block.canonical)}
    problems = [Problem(str(path), what, remedy) for what, remedy in _unclear(listed, layers)]
    if problems:
        raise PlanError(problems)
    return {layers[key].path: row for key, row in listed.items()}


def _path(given: str) -> Path:
    remedy = "Give the path of a file, 'weights' to have sizes computed, or a directory that 'raymerge "
    remedy += "calibrate' made."
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        raise PlanError(Problem(given, "there is no such user, and so no such file.", remedy)) from error
    if not path.is_file():
        raise PlanError(Problem(given, "there is no such file of scores.", remedy))
    if path.stat().st_size > _MAX_NBYTES:
        raise PlanError(Problem(given, "is too large for a file of scores.", HOW_TO_WRITE))
    return path


def _unclear(
    listed: Mapping[str, LayerScores], layers: Mapping[str, ExpertBlock]
) -> Iterator[tuple[str, str]]:
    strange = [key for key in listed if key not in layers]
    if strange:
        named = shortlist([repr(key) for key in strange], _SHOWN)
        what = f"it has scores for {named}, where no experts are."
        numbers = ", ".join(dict.fromkeys(str(block.layer) for block in layers.values()))
        yield what, f"Remove them, or use the file of this very model: its layers with experts are {numbers}."
    by_path: dict[str, list[str]] = {}
    for key in listed:
        if key in layers:
            by_path.setdefault(layers[key].path, []).append(key)
    for keys in by_path.values():
        if len(keys) > 1:
            yield f"{' and '.join(map(repr, keys))} name one and the same layer.", "Keep one of them."


def _parsed(path: Path) -> Mapping[str, LayerScores]:
    """Lists of numbers from a JSON file; anything else is left out, so that it is reported as missing."""
    try:
        data = parse_strict_json(path.read_bytes())
    except ValueError as error:
        raise PlanError(Problem(str(path), f"{error}.", HOW_TO_WRITE)) from error
    if not isinstance(data, dict):
        raise PlanError(Problem(str(path), "is no map of layers.", HOW_TO_WRITE))
    return {
        key: tuple(map(_number, value))
        for key, value in data.items()
        if (isinstance(value, list) and all(type(each) in (int, float) for each in value))
    }


def _number(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _tensors(path: Path) -> Mapping[str, LayerScores]:
    checkpoint = open_tensor_file(path, str(path))
    scores: dict[str, LayerScores] = {}
    with checkpoint.open() as store:
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype.torch_name is None or len(tensor.shape) != 1 or not tensor.nbytes:
                continue
            buffer = bytearray(store.read(tensor.key, tensor.offset, tensor.nbytes))
            values = torch.frombuffer(buffer, dtype=torch_dtype(tensor.dtype))
            scores[name] = tuple(values.double().tolist())
    return scores


Scores = Mapping[str, LayerScores]
"""A score for each expert, by the path of its block; more is better."""

FROM_WEIGHTS = "weights"

BASE = 0

_LARGEST = 1e300
# So that sums of scores are numbers too.


Report: TypeAlias = Mapping[str, Any]
"""Of a stage that measured experts."""


def given_report(recipe: ExpertSetRecipe, source: Source) -> Report | None:
    """The report of statistics that were made before, where ``scores`` names their directory."""
    given, place = recipe.experts.scores or "", recipe.where("experts", "scores")
    if recipe.is_measured or not os.path.isdir(os.path.expanduser(given)):
        return None
    given_statistics("experts", source, given, place=place)
    report: Report = statistics_record(given, place=place)["report"]
    return report


def read_scores(
    recipe: ExpertSetRecipe, resolver: InputResolver, blocks: Sequence[ExpertBlock], report: Report | None
) -> Scores:
    """``report``: of statistics; None where there are none yet, so that all experts of a layer are alike."""
    given, place = recipe.experts.scores or "", recipe.where("experts", "scores")
    if report is not None:
        return _of_statistics(report, blocks)
    if recipe.is_measured:
        return {block.path: (1.0,) * block.num_experts for block in blocks}
    try:
        scores = _of_weights(resolver, blocks) if given == FROM_WEIGHTS else file_scores(given, blocks)
    except UserError as error:
        other = " Or give the scores in a file." if isinstance(error, CheckpointError) else ""
        problems = [Problem(f"{place}: {e.where}", e.what, f"{e.remedy}{other}") for e in error.problems]
        raise PlanError(problems) from error
    problems = [
        Problem(f"{place}: {given}", sentence, HOW_TO_WRITE)
        for block in blocks
        for sentence in _objections(block, scores.get(block.path))
    ]
    if problems:
        raise PlanError(problems)
    return scores


def _objections(block: ExpertBlock, scores: LayerScores | None) -> Iterator[str]:
    where = f"layer {block.layer} ({block.path})"
    if scores is None:
        yield f"there are no scores for {where}."
    elif len(scores) != block.num_experts:
        yield f"{where} has {block.num_experts} experts, and {len(scores)} scores."
    elif not all(abs(score) <= _LARGEST for score in scores):
        yield f"the scores of {where} hold NaN, infinity or a number beyond {_LARGEST:g}."


def _of_statistics(report: Report, blocks: Sequence[ExpertBlock]) -> Scores:
    """Saliencies; sizes in layers that predict further tokens, which no text runs."""
    measured = {each["layer"]: tuple(each["saliency"]) for each in report["layers"]}
    return {
        block.path: tuple(report["sizes"][block.path]) if block.is_mtp else measured[block.layer]
        for block in blocks
    }


def dropping_risks(report: Report | None, drop: int) -> Mapping[int, str]:
    """What the texts that experts were measured on lose with those that are dropped, in words by layer."""
    if report is None:
        return {}
    tokens = sum(text["tokens"] for text in report["texts"])
    return {
        each[
            "layer"
        ]: f" (of the router's weight {100 * each['shares'][drop]:.2g} %; all of their experts lose "
        f"{each['lost'][drop]} of {tokens} tokens)"
        for each in report["layers"]
    }


def _of_weights(resolver: InputResolver, blocks: Sequence[ExpertBlock]) -> Scores:
    source = resolver.sources[BASE]
    if source.checkpoint.unwritten is not None:
        what = "scores are computed from weights while planning, and this model is not made yet."
        remedy = "Carry out the merge that makes it first, and name its output as base_model."
        raise PlanError(Problem(source.name, what, remedy))
    _refuse_codes(source, blocks)
    return sizes_of(source, blocks)


def sizes_of(source: Source, blocks: Sequence[ExpertBlock]) -> dict[str, LayerScores]:
    """How much each expert can do by its weights, by the path of its block."""
    with Weights(source, keeps_run=True) as weights:
        return {
            block.path: tuple(_size(weights, block, expert) for expert in range(block.num_experts))
            for block in blocks
        }


def _refuse_codes(source: Source, blocks: Sequence[ExpertBlock]) -> None:
    weights = quantised_tensors(source.checkpoint)
    heads = tuple(f"{block.path}.experts" for block in blocks)
    for name, form in {**stored_formats(weights), **weights.unknown}.items():
        if name.startswith(heads):
            what = f"its experts are stored as {form} (such as {name}), and sizes are those of plain numbers."
            remedy = CONVERT_FIRST if name in weights.members else USE_PLAIN
            raise PlanError(Problem(source.name, what, f"{remedy} Or give the scores in a file."))


def _size(weights: Weights, block: ExpertBlock, expert: int) -> float:
    """``|down| * sqrt(|gate|^2 + |up|^2)`` with Frobenius norms: how much an expert can do to its input."""
    head = f"{block.canonical}.experts.{expert}"
    squares = {each: _square(weights, f"{head}.{each}_proj.weight") for each in ("gate", "up", "down")}
    down, inner = squares.pop("down"), [square for square in squares.values() if square is not None]
    if down is None or not inner:
        what = f"the matrices of {head} cannot be told apart, so they have no sizes."
        raise PlanError(Problem(block.path, what, "Give the scores in a file."))
    return math.sqrt(down) * math.sqrt(math.fsum(inner))


def _square(weights: Weights, name: str) -> float | None:
    """Sum of the squares of all elements; None where there is no such matrix.

    Row by row, so that it does not depend on the number of threads."""
    try:
        matrix = weights.load(name)
    except KeyError:
        return None
    lengths = torch.linalg.vector_norm(matrix.contiguous(), dim=1, dtype=torch.float64)
    return math.fsum(length * length for length in lengths.tolist())


@dataclass(frozen=True, slots=True)
class Origin:
    source: int
    expert: int | None
    """Its number there; None for the feed-forward layer of a dense model."""


@dataclass(frozen=True, slots=True)
class NewExpert:
    origins: tuple[Origin, ...]
    weights: tuple[float, ...]
    row_of: int | None = None
    """The base's expert whose router row and biases it gets; None for those of its origins."""

    @property
    def rows(self) -> tuple[Origin, ...]:
        return self.origins if self.row_of is None else (Origin(0, self.row_of),)


Moves = Mapping[str, tuple[NewExpert, ...]]


class ExpertSelection:
    def __init__(
        self,
        recipe: ExpertSetRecipe,
        resolver: InputResolver,
        blocks: Sequence[ExpertBlock],
        findings: Findings,
    ) -> None:
        self._recipe = recipe
        self._change = recipe.experts
        self._resolver = resolver
        self._sources = resolver.sources
        self._blocks = blocks
        self._findings = findings
        scores = os.path.expanduser(recipe.experts.scores or "")
        self._is_saliency = recipe.is_measured or os.path.isdir(scores)
        self._fields = [expert_fields(each.checkpoint.config, each.rules) for each in resolver.sources]
        self._layers = frozenset(block.name_layer for block in blocks if not block.is_mtp)
        self._dense_layers = self._layers_with(BASE, Role.MLP) - self._layers

    def check(self) -> None:
        for path, ids in self._named():
            self._check_ids(path, ids, self._blocks[0].num_experts, self._sources[0].name)
        for key in ("keep", "merge"):
            self._check_layers(key)
        for layer, groups in () if self._change.merge is None else self._change.merge.entries():
            self._check_cover(("experts", "merge", *layer), groups)
        if self._change.drop is not None:
            self._check_drop(self._change.drop)
        for index, added in enumerate(self._change.add):
            self._check_added(index, added)
        if self._findings.is_empty:
            self._check_count()
        for index, added in enumerate(self._change.add):
            source = self._source(added)
            problems = [*self._other_meanings(source, added), *self._other_layers(source)]
            for what, remedy in problems if source != BASE else ():
                self._say(("experts", "add", index, "model"), what, remedy)

    def num_experts(self) -> int:
        change, before = self._change, self._blocks[0].num_experts
        if change.keep is not None:
            return change.keep.num_experts
        if change.merge is not None:
            return change.merge.num_experts
        if change.drop is not None:
            return before - change.drop
        return before + sum(len(self._origins(added)) for added in change.add)

    def moves(self, scores: Scores | None) -> Moves:
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
        if scores is None or len(group) == 1:
            return (1.0,) * len(group)
        weights = tuple(scores[block.path][expert] for expert in group)
        if min(weights) < 0:
            what = f"experts {_listed(group)} in layer {block.layer} have scores down to {min(weights):g}."
            self._say(("experts", "scores"), what, "Weights of a mean cannot be negative.")
        elif not any(weights) and self._is_saliency:
            # No text reached any of them.
            return (1.0,) * len(group)
        elif not any(weights):
            what = f"the scores of experts {_listed(group)} in layer {block.layer} are all 0."
            self._say(("experts", "scores"), what, "A weighted mean needs a weight above 0 in each group.")
        return weights

    def _kept(self, block: ExpertBlock, scores: Sequence[float], drop: int) -> list[int]:
        gone = set(dropping_order(scores, self.num_groups())[:drop])
        return [expert for expert in range(block.num_experts) if expert not in gone]

    def num_groups(self) -> int:
        fields = self._fields[0]
        return fields.num_groups if fields is not None else 1

    def _origins(self, added: AddedExpert) -> tuple[Origin, ...]:
        source = self._source(added)
        fields = self._fields[source]
        if fields is None:
            return (Origin(source, None),)
        listed = range(fields.count.value) if added.experts is None else added.experts
        return tuple(Origin(source, expert) for expert in listed)

    def _named(self) -> Iterator[tuple[FieldPath, tuple[int, ...]]]:
        change = self._change
        if change.keep is not None:
            for key, ids in change.keep.entries():
                yield ("experts", "keep", *key), ids
        if change.merge is not None:
            for key, groups in change.merge.entries():
                for number, ids in enumerate(groups):
                    yield ("experts", "merge", *key, number), ids
        for index, added in enumerate(change.add):
            if added.row_of is not None:
                yield ("experts", "add", index, "row_of"), (added.row_of,)
        if isinstance(change.dense, int):
            yield ("experts", "dense"), (change.dense,)
        if change.of is not None:
            yield ("experts", "of"), change.of

    def _check_ids(self, path: FieldPath, ids: Sequence[int], count: int, name: str) -> None:
        strange = [expert for expert in ids if expert >= count]
        if strange:
            what = f"there is no expert {_listed(strange)}: {name} has {count}, from 0 to {count - 1}."
            self._say(path, what, "Name experts that are there.")

    def _check_layers(self, key: str) -> None:
        lists = getattr(self._change, key)
        if lists is None or lists.everywhere is not None:
            return
        layers = {block.layer for block in self._blocks}
        given = {layer for layer, _ in lists.by_layer}
        if layers - given:
            what = f"these layers have experts too, and no list here: {_listed(sorted(layers - given))}."
            remedy = (
                "Name every layer that has experts; multi-token-prediction layers count after all others."
            )
            self._say(("experts", key), what, remedy)
        if given - layers:
            what = f"these layers have no experts: {_listed(sorted(given - layers))}."
            self._say(("experts", key), what, "Remove them.")

    def _check_cover(self, path: FieldPath, groups: ExpertGroups) -> None:
        named = {expert for group in groups for expert in group}
        absent = [expert for expert in range(self._blocks[0].num_experts) if expert not in named]
        if absent:
            what = f"these experts are in no group: {_listed(absent)}."
            self._say(path, what, "Put every expert into one group; one of its own keeps it as it is.")

    def _check_drop(self, drop: int) -> None:
        count, groups = self._blocks[0].num_experts, self.num_groups()
        if drop >= count:
            what = f"{drop} experts are to go, and there are {count} in each layer."
            self._say(("experts", "drop"), what, "Leave at least one.")
        elif drop % groups:
            below, above = drop - drop % groups, drop - drop % groups + groups
            numbers = " or ".join(str(n) for n in (below, above) if 0 < n < count)
            what = f"experts are chosen by {groups} groups, and {drop} cannot be taken from all alike."
            self._say(("experts", "drop"), what, f"Drop {numbers}." if numbers else "Use 'keep'.")

    def _check_added(self, index: int, added: AddedExpert) -> None:
        path: FieldPath = ("experts", "add", index)
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
        fields = self._fields[0]
        if fields is None or self._change.dense is not None:
            return
        count, by_pairs = self.num_experts(), any(block.has_selection_bias for block in self._blocks)
        for sentence in fields.objections(count, by_pairs=by_pairs):
            self._say(("experts",), sentence, _remedy(fields, count, by_pairs=by_pairs))

    def _say(self, path: FieldPath, what: str, remedy: str) -> None:
        self._findings.add(self._recipe.where(*path), what, remedy)

    def _source(self, added: AddedExpert) -> int:
        return next(source.index for source in self._sources if source.reference == added.model)

    def notes(self) -> Iterator[str]:
        base = self._sources[BASE].name
        for source in dict.fromkeys(self._source(added) for added in self._change.add):
            name, mine, theirs = self._sources[source].name, self._fields[BASE], self._fields[source]
            if theirs is None and (dense := self._taken_from(source) & self._dense_layers):
                yield f"{base} keeps its feed-forward layers where it has no experts: {_listed_layers(dense)}"
            chosen = [fields.chosen for fields in (mine, theirs) if fields is not None and fields.chosen]
            if len(chosen) == 2 and chosen[0].value != chosen[1].value:
                there, here = chosen[1].value, chosen[0].value
                yield f"{name} sends each token to {there} of its experts, the output to {here}"

    def is_left_behind(self, source: int, name: str) -> bool:
        info = self._resolver.logical[source].infos[name]
        is_there = info.layer in self._layers and info.stack == self._stack(source)
        fields = self._fields[source]
        if fields is None or not is_there or info.part is not Role.EXPERT:
            return fields is None and is_there and info.part is Role.MLP
        chosen = (added.experts for added in self._change.add if self._source(added) == source)
        return info.expert is None or any(each is None or info.expert in each for each in chosen)

    def _other_meanings(self, source: int, added: AddedExpert) -> Iterator[tuple[str, str]]:
        base, name = self._sources[BASE].name, self._sources[source].name
        mine, theirs = (expert_meaning(self._sources[each].checkpoint.config) for each in (BASE, source))
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
        base, name = self._sources[BASE].name, self._sources[source].name
        theirs, kind = self._taken_from(source), "experts"
        known = self._layers
        if self._fields[source] is None:
            kind, known = "feed-forward layers", known | self._dense_layers
        beyond, absent = theirs - known, self._layers - theirs
        if not beyond and not absent:
            return
        what = f"it has {kind} in {len(theirs)} layers, and {base} has experts in {len(self._layers)}"
        what += f"; there is no place for those of {_listed_layers(beyond)}" if beyond else ""
        what += f"; there are none for {_listed_layers(absent)}" if absent else ""
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


def dropping_order(scores: Sequence[float], num_groups: int) -> list[int]:
    """The order in which experts go: those with the lowest scores first, one of each group in turn. Of equal
    scores, the expert with the higher number goes."""
    size = len(scores) // num_groups
    orders = [
        sorted(range(first, first + size), key=lambda expert: (scores[expert], -expert))
        for first in range(0, size * num_groups, size)
    ]
    return [expert for turn in zip(*orders, strict=True) for expert in turn]


def regrouped(moves: Moves, blocks: Sequence[ExpertBlock], num_groups: int) -> list[int]:
    """Layers in which an expert leaves the group that the router knew it in."""
    return [
        block.layer
        for block in blocks
        for new in (moves[block.path],)
        if any(
            origin.source == BASE
            and origin.expert is not None
            and origin.expert * num_groups // block.num_experts != number * num_groups // len(new)
            for number, expert in enumerate(new)
            for origin in expert.origins
        )
    ]


def _alone(expert: int) -> NewExpert:
    return NewExpert((Origin(0, expert),), (1.0,))


def _remedy(fields: ExpertFields, count: int, *, by_pairs: bool) -> str:
    numbers = " or ".join(map(str, fields.nearest(count, by_pairs=by_pairs)))
    return f"Numbers of experts that work: {numbers}." if numbers else "Use another checkpoint."


def _listed(numbers: Sequence[int]) -> str:
    return shortlist(numbers, 8)


def _differ(mine: object, theirs: object) -> bool:
    return None not in (mine, theirs) and mine != theirs


def _listed_layers(layers: frozenset[int]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {_listed(sorted(layers))}"
