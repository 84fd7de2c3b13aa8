"""Recipes and opened sources to plans: each by its kind, and merges that use each other's results together.

Headers of a result follow from its plan, so a plan stands in for its checkpoint when the next merge is
planned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import xxhash

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.quantisation.detect import HF_QUANT_CONFIG
from raymerge.checkpoints.source import Checkpoint, Unwritten, in_natural_order, planned_file
from raymerge.documents.fields import did_you_mean
from raymerge.documents.positions import in_order
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, PlanError, Problem, UserError
from raymerge.merge_plan.plan import Plan, make_plan, planned_layout
from raymerge.planner.calibration import calibration_stage, method_stages, stage_report
from raymerge.planner.inputs.sources import (
    STAGE_RECORD,
    Opened,
    OpenedModels,
    Opener,
    Source,
    Stage,
    collector_paused,
    open_models,
    opener_of,
    prepared_of,
    unread_problems,
)
from raymerge.planner.moe.build import decide_mixture, moe_trunk
from raymerge.planner.moe.expert_permutation import align_stages
from raymerge.planner.moe.expert_set import decide_expert_set
from raymerge.planner.moe.shape import gate_stage, shape_of
from raymerge.planner.outputs.build import decide_merge, finish_plan
from raymerge.planner.parameter_check import check_recipe, neutral_recipe
from raymerge.planner.regmean import makes_by_regmean, regmean_stages, with_mixes
from raymerge.planner.router_repair import repair_stage
from raymerge.planner.tokenizer.vocabulary import approximation_of
from raymerge.planner.transplant import transplant_stages
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import Draft
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.order import AnyRecipe, references
from raymerge.recipes.router_repair import RouterRepair
from raymerge.recipes.schema import Recipe
from raymerge.storage.open import USUAL, Lookup


def stages_of(
    recipe: AnyRecipe, sources: Sequence[Source], *, version: str, made_by: Sequence[str] = ()
) -> tuple[Stage, ...]:
    """The stages that must run before a recipe, in order.

    ``made_by`` has the digests of the plans that make sources which do not exist yet: their headers do not
    depend on their numbers.

    Raises:
        PlanError: recipe and sources fit so little that there is nothing to show."""
    stages: Sequence[Stage] = ()
    if isinstance(recipe, MoeRecipe):
        stages = (gate_stage(recipe, shape_of(recipe, sources), version=version),)
    elif isinstance(recipe, Recipe) and isinstance(recipe.router, RouterRepair):
        stages = (repair_stage(recipe, recipe.router, sources, version=version),)
    elif isinstance(recipe, ExpertSetRecipe) and recipe.is_measured and recipe.calibrate is not None:
        place = recipe.where("experts", "scores")
        length = recipe.where("calibrate", "length")
        stages = (
            calibration_stage(
                "experts", sources[0], recipe.calibrate, place=place, version=version, length_place=length
            ),
        )
    elif isinstance(recipe, Recipe) and recipe.align:
        stages = align_stages(recipe, sources, version=version)
    elif isinstance(recipe, Recipe) and approximation_of(recipe) is not None:
        stages = transplant_stages(recipe, sources, version=version)
    if isinstance(recipe, Recipe):
        stages = (*stages, *method_stages(recipe, sources, version=version))
    if (
        isinstance(recipe, Recipe)
        and makes_by_regmean(recipe)
        and not isinstance(recipe.router, RouterRepair)
    ):
        measured = with_prepared(sources, stages, Path())
        stages = (*stages, *regmean_stages(recipe, measured, version=version))
    if not made_by:
        return tuple(stages)
    salted = ["/".join((stage.digest, *made_by)).encode() for stage in stages]
    digests = map(xxhash.xxh3_128_hexdigest, salted)
    return tuple(replace(stage, digest=own) for stage, own in zip(stages, digests, strict=True))


def with_prepared(sources: Sequence[Source], stages: Sequence[Stage], root: Path) -> tuple[Source, ...]:
    made: dict[int, list[Stage]] = {}
    for stage in stages:
        made.setdefault(stage.spec.owner.index, []).append(stage)
    return tuple(
        replace(source, prepared=tuple(prepared_of(stage, root) for stage in made.get(source.index, ())))
        for source in sources
    )


def build_plan(
    recipe: AnyRecipe, sources: Sequence[Source], *, version: str, report: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a recipe over its sources, which have the results of its stages. ``report``: of the stage
    that measures experts, once it is made.

    Problems are in the plan, so that it can be shown; ``Plan.require`` refuses them.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show."""
    with collector_paused():
        match recipe:
            case MoeRecipe():
                return finish_plan(decide_mixture(recipe, sources), version=version)
            case ExpertSetRecipe():
                return finish_plan(decide_expert_set(recipe, sources, report), version=version)
            case _:
                return finish_plan(with_mixes(decide_merge(recipe, sources)), version=version)


@dataclass(frozen=True, slots=True)
class PlannedMerge:
    recipe: AnyRecipe
    plan: Plan
    sources: tuple[Source, ...]
    stages: tuple[Stage, ...] = ()

    @property
    def uses(self) -> Mapping[int, str]:
        return {s.index: s.reference.path for s in self.sources if s.checkpoint.unwritten is not None}


Given: TypeAlias = Mapping[str, Checkpoint]
"""Models that are open already, by what recipes call them."""
NOTHING_GIVEN: Given = MappingProxyType({})


def plan_merges(
    recipes: Sequence[AnyRecipe],
    root: Path,
    *,
    version: str,
    opener: Opener | None = None,
    lookup: Lookup = USUAL,
    opened: Opened | None = None,
    given: Given = NOTHING_GIVEN,
    recorded: Path | None = None,
) -> tuple[PlannedMerge, ...]:
    """Plan recipes in the order of ``merge_order``; later ones may use results of earlier ones by name.

    Only the last plan may have problems, so that it can be shown. Results that others use lie below ``root``,
    each by its name; ``opener`` None opens models in each recipe's own way, and once for all calls that share
    ``opened``, but for those that are ``given``. ``recorded``: directory of the records of stages of a result
    that is there; where one has measured experts, below ``root`` or there, the plan is of its figures.

    Raises:
        PlanError: a merge that others need cannot be planned, or there is no plan to show; with the problems
            of all merges that could be examined."""
    names = tuple(recipe.name for recipe in recipes if recipe.name is not None)
    is_alone = len(recipes) == 1
    planner = _Planner(
        names, root, version, opener, lookup, opened=opened, is_alone=is_alone, given=given, recorded=recorded
    )
    looks = [planner.look(recipe) for recipe in recipes]
    merges = tuple(look.merge for look in looks if look.merge is not None)
    if len(merges) < len(looks) or any(look.problems for look in looks[:-1]):
        cause = next((look.error for look in looks if look.error is not None), None)
        every = in_order(problem for look in looks for problem in look.problems)
        if not every:
            raise RuntimeError("a merge has no plan, and nothing says why") from cause
        raise PlanError(every) from cause
    return merges


def draft_problems(
    draft: Draft,
    root: Path,
    *,
    version: str,
    lookup: Lookup = USUAL,
    opened: Opened | None = None,
    given: Given = NOTHING_GIVEN,
) -> tuple[Problem, ...]:
    """All problems of recipes that cannot be read as a whole, their models included.

    Nothing is fetched before the recipes can be read."""
    lookup = replace(lookup, fetches=False)
    is_alone = len(draft.recipes) == 1
    planner = _Planner(draft.names, root, version, None, lookup, is_alone, opened=opened, given=given)
    partial = {id(recipe) for recipe in draft.partial}
    looks = [planner.look(recipe, is_partial=id(recipe) in partial) for recipe in draft.recipes]
    later = (each for look in looks for each in look.problems if each.where not in draft.guessed)
    return in_order([*draft.problems, *later])


def planned_checkpoint(plan: Plan, root: Path, *, name: str, donor: Source) -> Checkpoint:
    """The checkpoint that a plan without problems writes to ``root``; file versions are empty."""
    given = donor.checkpoint
    written = {row["name"]: row["content"] for row in plan["files"].to_pylist()}
    copied = {*given.companions} - {*written, *plan.manifest["left_out"]}
    before = given.unwritten
    if before is not None:
        written = {key: text for key, text in before.written.items() if key in copied} | written
    shards = sorted(plan.columns("shards", "name", "nbytes", "header"))
    companions_root = given.root if before is None else before.companions_root
    beside = given.hf_quant_config if HF_QUANT_CONFIG in copied else {}
    if HF_QUANT_CONFIG in written:
        beside = load_json(written[HF_QUANT_CONFIG])
    return Checkpoint(
        name=name,
        root=str(root),
        config=plan.manifest["config"],
        tensors=planned_tensors(plan),
        components=given.components,
        files=tuple(planned_file(*shard) for shard in shards),
        companions=tuple(sorted({*copied, *written})),
        notes=(),
        unwritten=Unwritten(companions_root, written, twins=frozenset(_twins(plan, donor))),
        hf_quant_config=beside,
    )


def planned_as_measured(merge: PlannedMerge, root: Path) -> PlannedMerge:
    """A merge with the experts that its stage, whose result is below ``root``, has found; itself if nothing
    of it is measured. Raises PlanError: it cannot be made of these."""
    if not (isinstance(merge.recipe, ExpertSetRecipe) and merge.recipe.is_measured):
        return merge
    (stage,) = merge.stages
    report = stage_report(stage, root / stage.directory / STAGE_RECORD)
    before = merge.plan.manifest
    plan = build_plan(merge.recipe, merge.sources, version=str(before["raymerge"]), report=report).require()
    if merge.uses:
        signed = zip(plan.manifest["sources"], before["sources"], strict=True)
        made_by = [{**new, **{k: v for k, v in old.items() if k == "made_by"}} for new, old in signed]
        plan = make_plan({**plan.manifest, "sources": made_by}, plan.tables, plan.problems)
    return replace(merge, plan=plan)


class _Look(NamedTuple):
    merge: PlannedMerge | None
    problems: tuple[Problem, ...]
    error: UserError | None = None


@dataclass(frozen=True, slots=True)
class _Planner:
    names: tuple[str, ...]
    root: Path
    version: str
    opener: Opener | None
    lookup: Lookup
    is_alone: bool
    opened: Opened | None = None
    given: Given = field(default_factory=lambda: NOTHING_GIVEN)
    recorded: Path | None = None
    made: dict[str, PlannedMerge] = field(default_factory=dict)

    def look(self, recipe: AnyRecipe, *, is_partial: bool = False) -> _Look:
        """Plan a recipe; where that fails, or the recipe is only a part, collect every problem."""
        refused = () if self.is_alone else tuple(_foreign(recipe, self.names))
        opened = open_models(recipe, opener=self._opener_for(recipe), lookup=self.lookup)
        error: UserError | None = None
        if not (refused or is_partial):
            try:
                merge = self._planned(recipe, opened.require())
                return _Look(merge, merge.plan.problems)
            except UserError as failure:
                error = failure
        places = tuple(each.where for each in refused)
        absences = [each for each in opened.problems if not each.where.startswith(places)]
        rest = () if refused or is_partial else self._rest(recipe, opened)
        own: tuple[Problem, ...] = ()
        if not isinstance(recipe, ExpertSetRecipe):
            try:
                own = check_recipe(moe_trunk(recipe) if isinstance(recipe, MoeRecipe) else recipe).problems
            except PlanError as failure:
                own = failure.problems
        problems = (*refused, *own, *absences, *rest)
        return _Look(None, in_order(self.placed(recipe, problems)), error)

    def _rest(self, recipe: AnyRecipe, opened: OpenedModels) -> Iterator[Problem]:
        if not opened.sources:
            return
        try:
            problems = self._unplaced(recipe, opened.sources)[0].problems
        except UserError as error:
            problems = error.problems
            neutral = neutral_recipe(recipe) if isinstance(recipe, Recipe) else None
            if neutral is not None:
                with suppress(UserError):
                    problems += build_plan(neutral, opened.sources, version=self.version).problems
        places = {
            recipe.where(*path[:-1], key) for path, _ in opened.absent for key in (path[-1], "layer_range")
        }
        names = "|".join(re.escape(str(reference)) for _, reference in opened.absent)
        name = re.compile(rf"(?<![\w./-])({names})(?![\w/-])")
        for problem in (*unread_problems(recipe, opened.sources), *problems):
            is_of_absent = names and name.search(f"{problem.where} {problem.what}")
            if not is_of_absent and problem.where not in places:
                yield problem

    def _planned(self, recipe: AnyRecipe, sources: Sequence[Source]) -> PlannedMerge:
        plan, sources, stages = self._unplaced(recipe, sources)
        unread = unread_problems(recipe, sources)
        plan = replace(plan, problems=in_order((*unread, *self.placed(recipe, plan.problems))))
        merge = PlannedMerge(recipe, plan, tuple(sources), stages)
        merge = replace(merge, plan=self._signed(merge))
        if recipe.name is not None and not plan.problems:
            self.made[recipe.name] = merge
        return merge

    def _unplaced(
        self, recipe: AnyRecipe, sources: Sequence[Source]
    ) -> tuple[Plan, Sequence[Source], tuple[Stage, ...]]:
        unwritten = (s.reference.path for s in sources if s.checkpoint.unwritten is not None)
        made_by = tuple(self.made[name].plan.digest for name in unwritten if name in self.made)
        stages = stages_of(recipe, sources, version=self.version, made_by=made_by)
        report = None
        if isinstance(recipe, ExpertSetRecipe):
            report = self._measured(stages)
        else:
            sources = with_prepared(sources, stages, self.root)
        to_run = tuple(stage for stage in stages if not stage.made_at)
        return build_plan(recipe, sources, version=self.version, report=report), sources, to_run

    def _measured(self, stages: Sequence[Stage]) -> Mapping[str, Any] | None:
        """What the stage of an expert set found, where it was carried out before."""
        if not stages:
            return None
        (stage,) = stages
        kept = () if self.recorded is None else (self.recorded / f"{stage.directory}.json",)
        return stage_report(stage, self.root / stage.directory / STAGE_RECORD, *kept)

    def placed(self, recipe: AnyRecipe, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        if self.is_alone:
            return tuple(problems)
        place = recipe.where()
        file = place.split(":")[0]
        return tuple(
            each if each.where.startswith(file) else replace(each, where=f"{place}: {each.where}")
            for each in problems
        )

    def _opener_for(self, recipe: AnyRecipe) -> Opener:
        opener = self.opener or opener_of(recipe, self.lookup, self.opened)

        def open_one(reference: ModelReference) -> Checkpoint:
            merge = self.made.get(reference.path)
            if merge is not None:
                if isinstance(merge.recipe, ExpertSetRecipe) and merge.recipe.is_measured:
                    what = (
                        f"the result of {reference.path} is read by this merge, and its experts follow from "
                    )
                    what += "a measurement."
                    remedy = "Leave it to the last merge, or measure them before: raymerge calibrate."
                    raise PlanError(Problem(merge.recipe.where("experts", "scores"), what, remedy))
                if planned_layout(merge.plan) is not None:
                    what = f"the result of {reference.path} is read by this merge, and has a 'layout'."
                    raise PlanError(
                        Problem(merge.recipe.where("layout"), what, "Leave it to the last merge.")
                    )
                donor = merge.sources[int(merge.plan.manifest["donor"])]
                root = self.root / reference.path
                return planned_checkpoint(merge.plan, root, name=str(reference), donor=donor)
            if reference.path in self.names:
                raise PlanError(())  # Why it cannot be made is told where it is.
            if reference.path in self.given:
                return replace(self.given[reference.path], name=str(reference))
            try:
                return opener(reference)
            except NotCachedError:
                raise
            except CheckpointError as error:
                raise CheckpointError([self._hinted(reference, each) for each in error.problems]) from error

        return open_one

    def _hinted(self, reference: ModelReference, problem: Problem) -> Problem:
        if self.is_alone or "/" in reference.path or Path(reference.path).exists():
            return problem
        listed = ", ".join(f"'{name}'" for name in self.names)
        guess = did_you_mean(reference.path, self.names)
        hint = f"{guess} The merges of this file are {listed}.".strip()
        return replace(problem, remedy=f"{problem.remedy} {hint}".strip())

    def _signed(self, merge: PlannedMerge) -> Plan:
        """The plan with the digests of the plans that make its sources.

        The headers of a result do not depend on its numbers, which another plan may change."""
        if not merge.uses:
            return merge.plan
        sources = [dict(each) for each in merge.plan.manifest["sources"]]
        for index, name in merge.uses.items():
            sources[index]["made_by"] = self.made[name].plan.digest
        manifest = {**merge.plan.manifest, "sources": sources}
        return make_plan(manifest, merge.plan.tables, merge.plan.problems)


def _foreign(recipe: AnyRecipe, names: Sequence[str]) -> Iterator[Problem]:
    if isinstance(recipe, Recipe) and recipe.adapter is not None:
        what = "this merge makes an adapter, and merges of adapters are carried out one by one."
        yield Problem(recipe.where("adapter"), what, "Put it into a file of its own.")
    for path, reference in references(recipe):
        if reference.lora_path in names:
            what = f"'{reference.lora_path}' is a merge of this file: its result is a model, and no adapter."
            yield Problem(recipe.where(*path), what, "Name the directory of an adapter behind the '+'.")


def planned_tensors(plan: Plan) -> dict[str, StoredTensor]:
    """Where each tensor of the output will lie, in natural order of their names."""
    shards = plan["shards"].column("name").to_pylist()
    columns = ("name", "dtype", "shape", "shard", "offset", "nbytes")
    return in_natural_order(
        StoredTensor(name, DType(dtype), tuple(shape), shards[shard], offset, nbytes)
        for name, dtype, shape, shard, offset, nbytes in plan.columns("tensors", *columns)
    )


def _twins(plan: Plan, donor: Source) -> Iterator[tuple[str, str]]:
    """Head and embedding where both are written and the config declares them tied.

    Where the plan makes them differ, the config says so. A copied text model keeps the donor's tie."""
    tie = plan.manifest["tie"]
    if tie["head"]:
        yield tie["head"], tie["embedding"]
    elif donor.pair is not None and donor.stored_head_is_embedding:
        yield donor.pair.head, donor.pair.embedding
