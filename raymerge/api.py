"""The Python API: the same power as the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from raymerge.checkpoints.adapters import is_adapter
from raymerge.checkpoints.source import Checkpoint
from raymerge.deferred import torch
from raymerge.device_numerics import Fallback, choose_device, torch_threads
from raymerge.diagnosis.check import Check
from raymerge.documents.fields import did_you_mean
from raymerge.documents.positions import in_order
from raymerge.errors import CheckpointError, OptionError, PlanError, Problem, RecipeError
from raymerge.events import CheckpointsPassedOver, OnEvent, OutputKept, RayLeftOut, SearchEnded
from raymerge.lora.combine import plan_adapters
from raymerge.lora.extract import ExtractOptions, Selection, extract_lora
from raymerge.lora.matrices import Limits, parsed_model
from raymerge.lora.writer import Combination, Extraction, ModuleReport, output_directory
from raymerge.merge_plan.joint import with_tables_of
from raymerge.merge_plan.tables import Plan
from raymerge.options import Device, RunOptions
from raymerge.planner.calibration import calibration_stage
from raymerge.planner.calibration_use import unused_calibration
from raymerge.planner.inputs.in_memory import InMemoryModel, open_in_memory
from raymerge.planner.inputs.sources import Source, StatisticsKind, open_reference, source_of, with_adapter
from raymerge.planner.inputs.training_run import run_files
from raymerge.planner.inspection import Inspection, inspect_checkpoint
from raymerge.planner.merges import PlannedMerge, draft_problems, plan_merges
from raymerge.planner.suggestion.choice import Kind, Suggestion, arranged, choose, variants
from raymerge.planner.suggestion.models import find_base, read_models
from raymerge.planner.suggestion.text import write as suggestion_text
from raymerge.publish.finish import Provenance, read_record
from raymerge.publish.hub_push import Pushed, PushTarget, push_checkpoint
from raymerge.publish.output_place import place_of, steps_directory, sweep_steps
from raymerge.publish.record import RECORD, STAGES, Journal
from raymerge.recipe_search.job import Search, SearchJob, SearchOptions, finish_search
from raymerge.recipe_search.planning import PlannedSearch
from raymerge.recipe_search.planning import plan_search as planned_search
from raymerge.recipe_search.report import with_trials
from raymerge.recipe_search.trials import Trial, best_first, search_directory
from raymerge.recipes.calibration import DEFAULT_TOKENS, Calibrate
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import (
    Draft,
    conversion_recipe,
    draft_mapping,
    draft_recipes,
    join_drafts,
    parse_recipes,
    recipe_from_mapping,
    transplant_recipe,
    with_order_problems,
)
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.order import AnyRecipe, merge_order, references
from raymerge.recipes.schema import Recipe
from raymerge.recipes.search import has_search, is_search_file, read_marked, read_marked_mapping
from raymerge.recipes.sweep import (
    SweepDraft,
    SweepOutput,
    draft_sweep,
    draft_sweep_mapping,
    has_sweep_keys,
    is_sweep_file,
    joined_problems,
)
from raymerge.runtime.driver.adapter_run import AdapterRun
from raymerge.runtime.driver.audit_run import Audit, AuditOptions
from raymerge.runtime.driver.calibration_run import CalibrationRun
from raymerge.runtime.driver.chained_merges import MergeJob
from raymerge.runtime.driver.in_process import run_options
from raymerge.runtime.driver.merge_store import open_merge
from raymerge.runtime.driver.replay import ReplayVerdict, replay_checkpoint
from raymerge.runtime.driver.report_run import ReportRun, Subject, subject_of_merge, subject_of_output
from raymerge.runtime.driver.run import RunResult
from raymerge.runtime.driver.sweep_run import OutputMerges, SweepJob
from raymerge.runtime.driver.tensor_stream import TensorStream
from raymerge.runtime.driver.versions import commits_begun
from raymerge.runtime.workers.pool import Pool
from raymerge.runtime.workers.sizing import free_memory
from raymerge.stages.loss import Evaluation, Evaluator, OnLayer
from raymerge.stages.texts import TextReader, check_numbers
from raymerge.storage.addresses import NO_OPTIONS, StoreOptions, is_remote, join, shown
from raymerge.storage.open import NO_COMMITS, UNFETCHED, Lookup, open_store, resolve_source
from raymerge.storage.temporary import OwnDirectory
from raymerge.verifier.audit import AuditVerdict
from raymerge.verifier.compare import Comparison, compare_checkpoints
from raymerge.verifier.load import LoadVerdict, copy_to_load, load_checkpoint
from raymerge.verifier.measurements import Report
from raymerge.verifier.structure import PROVENANCE_FILE, Verdict, verify_structure

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile

_MOST_THREADS = 8
_NOWHERE: Mapping[str, str] = MappingProxyType({})


def verify_load(
    path: str | Path,
    *,
    memory: int | None = None,
    trust_remote_code: bool = False,
    scratch: str | None = None,
) -> LoadVerdict:
    """Verify that transformers loads a checkpoint with strict keys, and run it if it fits the memory.

    Args:
        memory: bytes; None for what is free. Of a larger model only names and shapes are compared.
        trust_remote_code: run Python files of the checkpoint if transformers does not know its model.
        scratch: directory for a copy of a remote checkpoint; None for the system's.

    Raises:
        OptionError: invalid address, or ``scratch`` is not writable.
        CheckpointError: the remote checkpoint cannot be read."""
    free, place = free_memory(), str(place_of(path, RunOptions()))
    limit = free if memory is None else min(memory, free)
    with copy_to_load(place, memory=limit, scratch=scratch) as (root, lack):
        return load_checkpoint(
            root,
            # A copy may take memory too: directories of what is temporary are often there.
            memory=min(limit, free_memory()),
            trust_remote_code=trust_remote_code,
            name=shown(place),
            lack=lack,
        )


def replay(path: str | Path, sources: Mapping[str, str] = _NOWHERE) -> ReplayVerdict:
    """Derive the provenance of a checkpoint again from its recipe and sources, and compare; reads its bytes.

    Nothing is downloaded: Hub models must be in the local cache. ``sources`` gives the present places of
    sources by their names in the recipe. OptionError for an invalid address."""
    return replay_checkpoint(place_of(path, RunOptions()), sources)


def diff(a: str | Path, b: str | Path, *, threads: int | None = None) -> Comparison:
    """Compare two checkpoints, byte by byte and by numbers, whatever their files and layouts.

    ``threads`` tensors at once; None for the number of cores, at most 8. Raises CheckpointError if one is
    absent, broken or unsupported, OptionError for invalid ``threads``."""
    if threads is not None and threads < 1:
        what = f"{threads} threads cannot compare anything."
        raise OptionError(Problem("--threads", what, "Give 1 or more, or leave it out."))
    usual = min(_MOST_THREADS, os.cpu_count() or 1)
    return compare_checkpoints(_opened(a), _opened(b), threads=threads or usual)


def report(
    what: RecipesLike,
    options: RunOptions | None = None,
    *,
    is_exact: bool = False,
    sources: Mapping[str, str] = _NOWHERE,
    steps: str | None = None,
    on_event: OnEvent | None = None,
) -> Report:
    """What the parents of a merge change and where they disagree: of a recipe before it is merged, or of a
    checkpoint that raymerge made.

    It runs in this process unless the options name several workers or a cluster.

    Args:
        what: a recipe as ``plan`` takes it (a file, if text; of several merges the last whose models are all
            there), else the place of a checkpoint.
        is_exact: read every element, and not a sample of each tensor.
        sources: of a checkpoint, present directories of sources by their names in the recipe.
        steps: of a checkpoint, where results in between were kept.

    Raises:
        RaymergeError: as ``plan``; CheckpointError: the checkpoint keeps no plan, or its sources are gone."""
    if isinstance(what, str | Path) and not os.path.isfile(what):
        place = place_of(what, options or RunOptions())
        if not is_remote(str(place)) and not os.path.isdir(place):
            problem = "there is nothing here.", "Name a recipe, or a checkpoint that raymerge made."
            raise CheckpointError(Problem(str(what), *problem))
        with subject_of_output(place, sources, steps) as subject:
            return _reported(subject, options, is_exact=is_exact, on_event=on_event)
    merges = plan_for(what, "merged", options)
    # Of several merges the last whose models are all there.
    merge = next((each for each in reversed(merges) if not each.uses), merges[-1])
    own = merge.recipe.name if len(merges) > 1 else None
    name = str(what) if isinstance(what, str | Path) else own or merge.recipe.name or "recipe"
    subject = subject_of_merge(merge, f"{name}: {own}" if own and own != name else name)
    return _reported(subject, options, is_exact=is_exact, on_event=on_event)


def report_difference(
    a: str | Path,
    b: str | Path,
    options: RunOptions | None = None,
    *,
    is_exact: bool = False,
    on_event: OnEvent | None = None,
) -> Report:
    """What ``b`` changes of ``a``: two checkpoints whose tensors agree. Raises as ``report``, and OptionError
    where both are one place."""
    if os.path.realpath(a) == os.path.realpath(b):
        what = f"{shown(str(b))} is A itself, so there is nothing to measure."
        raise OptionError(Problem("--report", what, "Name two checkpoints."))
    delta = {"model": str(b), "parameters": {"weight": 1.0}}
    recipe = {"merge_method": "task_arithmetic", "base_model": str(a), "models": [delta]}
    merge = plan_for(recipe, "merged", options)[-1]
    subject = subject_of_merge(merge, f"{shown(str(a))} and {shown(str(b))}", "diff")
    return _reported(subject, options, is_exact=is_exact, on_event=on_event)


def _reported(
    subject: Subject, options: RunOptions | None, *, is_exact: bool, on_event: OnEvent | None
) -> Report:
    chosen, emit = replace(options or RunOptions(), device="cpu"), on_event or (lambda _: None)
    if chosen.address is None and chosen.workers in (None, 1):
        # Samples are read in less time than it takes to start workers.
        chosen = replace(chosen, inline=True)
    run = ReportRun(subject, chosen, is_exact=is_exact, on_event=emit)
    with _started(chosen, emit, parts=run.num_parts) as pool:
        return run.carry_out(pool)


def evaluate(
    model: RecipesLike,
    texts: Sequence[str | Path],
    *,
    length: int | None = None,
    tokens: int | None = None,
    memory: int | None = None,
    threads: int | None = None,
    device: Device = "auto",
    scratch: str | None = None,
    on_layer: OnLayer = lambda *_: None,
) -> Evaluation:
    """How well a model predicts texts, or what assistants say in conversations (``.jsonl``): the mean of
    -log p(token), in nats, computed in float32 with one layer in memory at a time.

    Args:
        model: a directory, Hub name or address, with an adapter on it if ``+`` and its place follow; or a
            recipe as ``plan`` takes it (a file, if text), whose result is not written.
        texts: files, UTF-8.
        length: tokens of a window; None for 512, or what the model reads at once if that is less.
        tokens: most tokens of each file that are judged, from its start.
        memory: bytes; None for half of what is free. Hidden states that do not fit go to a file. Of a recipe
            half is for what makes its result.
        threads: threads that compute; None for torch's.
        device: where; ``auto`` takes a GPU that works. If that has too little memory, the CPU does it.
        scratch: directory for that file; None for the system's.
        on_layer: called after each layer with the number of layers that are done, and of all.

    Raises:
        CheckpointError: the model is absent, broken or unsupported.
        PlanError: it cannot be run layer by layer, has no tokenizer, or a file has nothing to judge.
        OptionError: an option is invalid, or the memory too little for a layer.
        NonFiniteError: the model computes NaN or infinity; which layer does."""
    if not texts:
        raise OptionError(Problem("--texts", "there is no file.", "Name one or more."))
    asked = RunOptions(inline=True, memory=memory, threads=threads, device=device)
    making = replace(asked, memory=None if memory is None else max(1, memory // 2))
    with _evaluated(model, making) as source:
        reader = TextReader(source, length=length, num_tokens=tokens)
        files = reader.read([str(path) for path in texts])
        is_made = source.checkpoint.opener is not None
        given = free_memory() // 2 if memory is None else memory
        with torch_threads(threads), OwnDirectory(scratch) as spill:

            def measure(chosen: torch.device, _: str) -> Evaluation:
                evaluator = Evaluator(files, memory=given, spill=spill, device=chosen, num_shares=1 + is_made)
                losses = evaluator.losses(source, on_layer=on_layer)
                return Evaluation(source.name, reader.length, chosen.type, losses)

            return Fallback(choose_device(device)).run(measure)


def calibrate(
    model: str | Path,
    texts: Sequence[str | Path],
    output: str | Path,
    options: RunOptions | None = None,
    *,
    statistics: StatisticsKind = "experts",
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    on_event: OnEvent | None = None,
) -> Mapping[str, Any]:
    """Run a model on texts, one layer in memory at a time, and leave statistics of what it computes, for
    ``scores`` of an expert set and ``statistics`` of a merge. The same call goes on with what was stopped.

    Args:
        model: a directory, Hub name or address.
        texts: files, UTF-8: text, or conversations (``.jsonl``).
        output: directory of the statistics.
        statistics: ``experts`` for how much each expert does, ``inputs`` for Gram matrices of what linear
            maps see, ``fisher`` for the diagonal of the Fisher information.
        tokens: most tokens of each file.
        length: tokens of a window; None for 512, or what the model reads at once if that is less.

    Returns: the report, as JSON values.

    Raises:
        CheckpointError: the model is absent, broken or unsupported.
        PlanError: it cannot be run layer by layer, or a file has nothing to read.
        OptionError: an option is invalid, or the memory too little for a layer.
        TargetError: something else is at the output place.
        NonFiniteError: the model computes NaN or infinity; which layer does, for which text."""
    chosen, emit = options or RunOptions(), on_event or (lambda _: None)
    reference = parsed_model(str(model))
    source = with_adapter(source_of(0, reference, open_reference(reference)))
    check_numbers(length, tokens, source)
    asked = Calibrate(texts=tuple(map(str, texts)), tokens=tokens, length=length)
    stage = calibration_stage(statistics, source, asked, place="--texts", version=version("raymerge"))
    run = CalibrationRun(stage, Path(os.path.realpath(output)), chosen, on_event=emit)
    if chosen.address is None and (chosen.workers == 1 or run.num_units == 1):
        chosen = replace(chosen, inline=True)
    with _started(chosen, emit, parts=run.num_units) as pool:
        return run.carry_out(pool)


@contextmanager
def _evaluated(model: RecipesLike, making: RunOptions) -> Iterator[Source]:
    """A model, or the result of a recipe, which is made as it is read."""
    if isinstance(model, str | Path) and not os.path.isfile(model):
        reference = parsed_model(str(model))
        checkpoint = open_reference(reference)
        # Its options say where it is found, and not which it is.
        yield with_adapter(source_of(0, reference, replace(checkpoint, name=shown(checkpoint.name))))
        return
    with open_merge(plan_for(model, "merged"), making) as source:
        name = str(model) if isinstance(model, str | Path) else source.name
        yield replace(source, checkpoint=replace(source.checkpoint, name=name))


def inspect(path: str | Path) -> Inspection:
    """The contents of a directory or Hub model (with or without revision), from headers. Raises
    CheckpointError if it is absent, broken or unsupported."""
    return inspect_checkpoint(_opened(path))


def _opened(path: str | Path) -> Checkpoint:
    reference = parsed_model(str(path))
    if reference.lora_path is not None:
        what = "this names an adapter on a model."
        raise CheckpointError(Problem(str(path), what, "Give the model alone."))
    checkpoint = open_reference(reference, with_components=True)
    # Its options say where it is found, and not which it is.
    return replace(checkpoint, name=shown(checkpoint.name))


__all__ = [
    "AuditOptions",
    "AuditVerdict",
    "Check",
    "Combination",
    "Comparison",
    "Evaluation",
    "ExtractOptions",
    "Extraction",
    "InMemoryModel",
    "Inspection",
    "Limits",
    "LoadVerdict",
    "ModuleReport",
    "Plan",
    "PlannedOutput",
    "PlannedSearch",
    "RecipeLike",
    "RecipesLike",
    "ReplayVerdict",
    "Report",
    "RunOptions",
    "RunResult",
    "SearchOptions",
    "SearchResult",
    "Selection",
    "Suggestion",
    "SweepOutput",
    "TensorStream",
    "Trial",
    "Verdict",
    "audit",
    "calibrate",
    "conversion",
    "diagnose",
    "diff",
    "evaluate",
    "extract_lora",
    "inspect",
    "is_search",
    "is_sweep",
    "merge_adapters",
    "merges_adapters",
    "plan",
    "plan_all",
    "plan_for",
    "plan_search",
    "plan_sweep",
    "push",
    "read_recipe",
    "read_recipes",
    "read_sweep",
    "replay",
    "report",
    "report_difference",
    "search",
    "stream",
    "submit",
    "submit_sweep",
    "suggest_recipe",
    "suggestion_text",
    "transplantation",
    "verify",
    "verify_load",
]

RecipeLike = AnyRecipe | Mapping[str, object] | str | Path
RecipesLike = RecipeLike | Sequence[RecipeLike]
"""One recipe, a file of several, or a sequence of recipes that use each other's results by name."""
Models = Mapping[str, InMemoryModel]
NO_MODELS: Models = MappingProxyType({})


def read_recipe(recipe: RecipeLike) -> AnyRecipe:
    """Raises RecipeError if it is not valid, or the file holds several."""
    return _only(read_recipes(recipe))


def _only(recipes: Sequence[AnyRecipe]) -> AnyRecipe:
    if len(recipes) > 1:
        what = f"there are {len(recipes)} recipes where one is expected."
        remedy = "Use 'plan_all' and 'submit', which take several; a merge of adapters is a recipe alone."
        raise RecipeError(Problem(recipes[0].where(), what, remedy))
    return recipes[0]


def read_recipes(recipes: RecipesLike) -> tuple[AnyRecipe, ...]:
    """Recipes in order of dependency; the last is the result. RecipeError if they are invalid or
    inconsistent."""
    return merge_order(_draft(recipes).require())


def plan(recipe: RecipeLike, *, models: Models = NO_MODELS) -> Plan:
    """Every output byte with its origin. Reads headers, writes nothing. Of a recipe that stands for several
    merges (``router: repair``) the last.

    The plan carries its problems; ``Plan.require`` raises them. ``models``: parents in memory, by what the
    recipe calls them.

    Raises:
        RecipeError: the recipe is not valid, with the problems of its models too; or the file holds several
            (see ``plan_all``).
        PlanError: recipe and sources fit too badly for a plan, or it merges adapters."""
    draft = _draft(recipe)
    return plan_all(recipe if draft.problems else _only(draft.recipes), models=models)[-1]


def plan_all(recipes: RecipesLike, *, models: Models = NO_MODELS) -> tuple[Plan, ...]:
    """The plans of several merges, in order of execution; only the last, of the result, carries problems.

    Raises:
        RecipeError: the recipes are invalid or inconsistent.
        PlanError: as ``plan``, or a merge that others use has problems; with the problems of all merges."""
    return tuple(merge.plan for merge in plan_for(recipes, "merged", models=models))


def plan_for(
    recipes: RecipesLike, output: str | Path, options: RunOptions | None = None, *, models: Models = NO_MODELS
) -> tuple[PlannedMerge, ...]:
    """The merges of ``plan_all`` with their sources; raises the same errors, and CheckpointError where a
    model in memory has tensors that no file could hold.

    ``output`` decides where intermediate results lie unless the options do; an unfinished run there fixes the
    commits of Hub models."""
    draft = _draft(recipes)
    chosen = options or RunOptions()
    place = place_of(output, chosen)
    ordered = draft.recipes if draft.problems else merge_order(draft.recipes)
    if (adapters := _of_adapters(ordered)) is not None:
        raise PlanError(in_order([*draft.problems, _no_plan(adapters)]))
    steps = steps_directory(place, chosen.steps)
    commits = NO_COMMITS if chosen.replace or draft.problems else commits_begun(ordered, place, steps)
    lookup = Lookup(options=chosen.storage, commits=commits)
    unused = [] if draft.problems else list(_unused(models, ordered))
    if unused:
        raise PlanError(unused)
    given = {name: open_in_memory(model, name) for name, model in models.items()}
    if draft.problems:
        raise RecipeError(
            draft_problems(draft, steps, version=version("raymerge"), lookup=lookup, given=given)
        )
    # What experts were chosen by is kept with what was made of them.
    recorded = None if is_remote(str(place)) else Path(place) / RECORD / STAGES
    return plan_merges(
        ordered, steps, version=version("raymerge"), lookup=lookup, given=given, recorded=recorded
    )


def _unused(models: Models, recipes: Sequence[AnyRecipe]) -> Iterator[Problem]:
    named = {reference.path for recipe in recipes for _, reference in references(recipe)}
    for name in models.keys() - named:
        what = f"no recipe names a model {name!r}."
        yield Problem("models", what, did_you_mean(name, sorted(named)) or "Leave it out.")


class PlannedOutput(NamedTuple):
    """One output of a sweep, with the merges of its plain recipe in order of dependency."""

    output: SweepOutput
    merges: tuple[PlannedMerge, ...]


def is_sweep(recipe: RecipesLike) -> bool:
    """Whether ``submit_sweep`` applies rather than ``submit``: it has ``sweep`` or ``checkpoints``. Invalid
    recipes count as far as readable."""
    if isinstance(recipe, Mapping):
        return has_sweep_keys(recipe)
    return isinstance(recipe, str | Path) and is_sweep_file(recipe)


def read_sweep(recipe: RecipesLike, options: RunOptions | None = None) -> tuple[SweepOutput, ...] | None:
    """The outputs of a recipe with ``sweep`` or ``checkpoints``; None if it has neither. Raises RecipeError
    with all faults."""
    draft = _draft_sweep(recipe, options or RunOptions())
    return None if draft is None else draft.require()


def plan_sweep(
    recipe: RecipesLike, output: str | Path = "merged", options: RunOptions | None = None
) -> tuple[PlannedOutput, ...]:
    """Plan all outputs of a sweep, each as its plain recipe; models are opened once.

    The last plan of each carries its problems; ``joined_problems`` joins them. ``output`` is the directory of
    the outputs' directories.

    Raises:
        RecipeError: the recipe is not valid, with the problems of its models too; or it is no sweep.
        PlanError: as ``plan_all``, for any of the outputs."""
    chosen = options or RunOptions()
    draft = _draft_sweep(recipe, chosen)
    if draft is None:
        what = "there is neither 'sweep' nor 'checkpoints' in this recipe."
        raise RecipeError(Problem(str(recipe), what, "Use 'plan_all', or add one."))
    places = [place_of(join(str(output), each.name), chosen) for each in draft.outputs]
    # Equal results between are made once for all outputs.
    steps = sweep_steps(place_of(output, chosen), chosen.steps)
    opened: dict[tuple[object, ...], Checkpoint] = {}
    if draft.problems:
        raise RecipeError(_sweep_problems(draft, Lookup(options=chosen.storage), opened))
    ordered = [merge_order(each.recipes) for each in draft.outputs]
    if (adapters := _of_adapters(ordered[0])) is not None:
        raise PlanError(_no_sweep(adapters))
    measured = [each for each in ordered[0] if isinstance(each, ExpertSetRecipe) and each.is_measured]
    if measured:
        what = "experts are measured while a recipe is carried out; a sweep plans all of its outputs before."
        remedy = (
            "Measure them before by 'raymerge calibrate MODEL --texts FILE -o DIR', and write 'scores: DIR'."
        )
        raise PlanError(Problem(measured[0].where("experts", "scores"), what, remedy))
    begun = [
        NO_COMMITS if chosen.replace else commits_begun(recipes, place, steps, or_published=True)
        for recipes, place in zip(ordered, places, strict=True)
    ]
    # What no unfinished run fixes is the same for all outputs, so that it is read once.
    common = {key: commit for each in reversed(begun) for key, commit in each.items()}
    planned: list[PlannedOutput] = []
    problems: list[tuple[Problem, ...]] = []
    for each, recipes, commits in zip(draft.outputs, ordered, begun, strict=True):
        lookup = Lookup(options=chosen.storage, commits={**common, **commits})
        try:
            merges = plan_merges(recipes, steps, version=version("raymerge"), lookup=lookup, opened=opened)
        except PlanError as error:
            problems.append(error.problems)
            continue
        if planned:
            first = planned[0].merges[-1].plan
            merges = (*merges[:-1], replace(merges[-1], plan=with_tables_of(merges[-1].plan, first)))
        planned.append(PlannedOutput(each, merges))
        problems.append(merges[-1].plan.problems)
    if len(planned) < len(problems):
        raise PlanError(joined_problems(draft.values, problems))
    return tuple(planned)


def submit(
    recipe: RecipesLike,
    output: str | Path,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent | None = None,
) -> RunResult:
    """Merge, verify and publish; the same call resumes an unfinished run.

    Several recipes are carried out in order of dependency. ``output`` is a directory or a place in an object
    store. A small merge runs in this process where the options leave that open (``RunOptions.inline``).

    Raises:
        PlanError: recipe and sources do not fit, or the recipe merges adapters (see ``merge_adapters``).
        RaymergeError: see its subclasses; ``exit_code`` distinguishes a user's error from an unfinished run.
    """
    began = time.monotonic()
    chosen = options or RunOptions()
    place = place_of(output, chosen)
    draft = _draft(recipe)
    if draft.problems:
        plan_for(recipe, place, chosen)
    with Journal(on_event or (lambda _: None)) as emit:
        merges = plan_for(merge_order(draft.require()), place, chosen)
        asked, chosen = chosen, run_options([merges], place, chosen)
        job = MergeJob(merges, place, chosen, on_event=emit, began=began, journal=emit)
        job.check()
        if chosen.inline and not asked.inline:
            emit(RayLeftOut())
        # No more workers than parts of the work, if known by now.
        with _started(chosen, emit, parts=job.most_segments) as pool:
            return job.carry_out(pool)


def stream(
    recipe: RecipesLike,
    options: RunOptions | None = None,
    *,
    models: Models = NO_MODELS,
    on_event: OnEvent | None = None,
) -> TensorStream:
    """The tensors that ``submit`` would write, one after the other and without files.

    An iterable of ``(name, tensor)``, in the memory that the options give; it is made in this process, also
    where that is a worker of Ray. No weight is read before the first tensor is asked for. ``models``: parents
    in memory, by what the recipe calls them.

    Raises:
        PlanError: recipe and sources do not fit, or torch lacks a dtype of the result.
        OptionError: too little memory, other workers, or a recipe whose results between need files.
        RaymergeError: as ``plan``."""
    chosen = options or RunOptions()
    merges = plan_for(recipe, "merged", chosen, models=models)
    return TensorStream(merges, chosen, on_event=on_event or (lambda _: None))


def submit_sweep(
    recipe: RecipesLike,
    output: str | Path,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent | None = None,
) -> Mapping[str, RunResult]:
    """Make all outputs of a sweep, with as few reads of the models as the memory limit allows; returns their
    results by name. Each is what ``submit`` of its plain recipe makes, byte by byte.

    ``output`` is the directory, or the place in an object store, below which each output has a directory of
    its name. The same call goes on with what is missing: outputs that are published and untouched are left
    as they are.

    Raises:
        RecipeError: the recipe is not valid, or no sweep.
        PlanError: recipe and sources do not fit.
        RaymergeError: as ``submit``; with what each missing output failed with, while the others are
            published. IncompleteError if the same call would go on with some of them."""
    began = time.monotonic()
    chosen, emitted = options or RunOptions(), on_event or (lambda _: None)
    with Journal(emitted) as emit:
        planned = _require_sound(plan_sweep(recipe, output, chosen))
        outputs = [
            OutputMerges(each.output.name, place_of(join(str(output), each.output.name), chosen), each.merges)
            for each in planned
        ]
        place, merges = place_of(output, chosen), [each.merges for each in outputs]
        asked, chosen = chosen, run_options(merges, place, chosen)
        job = SweepJob(outputs, place, chosen, on_event=emit, began=began)
        job.check()
        checkpoints = (each for own in planned for each in own.output.checkpoints.unfinished)
        if unfinished := {each.place: each.reason for each in checkpoints}:
            emit(CheckpointsPassedOver(unfinished))
        if chosen.inline and not asked.inline:
            emit(RayLeftOut())
        with _started(chosen, job.emit, parts=job.most_segments) as pool:
            return job.carry_out(pool)


def _require_sound(planned: Sequence[PlannedOutput]) -> Sequence[PlannedOutput]:
    """Raises PlanError: some have problems."""
    values, plans = [each.output.values for each in planned], [each.merges[-1].plan for each in planned]
    if problems := joined_problems(values, [plan.problems for plan in plans]):
        raise PlanError(problems)
    return planned


class SearchResult(NamedTuple):
    search: Search
    run: RunResult
    """Of the best candidate."""
    best: Trial
    trials: tuple[Trial, ...]
    """By number."""


def is_search(recipe: RecipesLike) -> bool:
    """Whether ``search`` applies rather than ``submit``. Invalid recipes count as far as readable."""
    if isinstance(recipe, Mapping):
        return has_search(recipe)
    return isinstance(recipe, str | Path) and is_search_file(recipe)


def plan_search(
    recipe: Mapping[str, object] | str | Path,
    output: str | Path = "merged",
    options: RunOptions | None = None,
    *,
    evaluations: int | None = None,
) -> PlannedSearch:
    """What is searched for and how, with the plan of one candidate; candidates with the extreme values of
    all parameters have no problems.

    Raises:
        RecipeError: the recipe is not valid, or nothing is searched for.
        PlanError: candidates and sources do not fit."""
    marked = read_marked_mapping(recipe) if isinstance(recipe, Mapping) else read_marked(recipe)
    chosen = options or RunOptions()
    return planned_search(marked, place_of(output, chosen), chosen, evaluations=evaluations)


def search(
    recipe: Mapping[str, object] | str | Path,
    output: str | Path,
    options: RunOptions | None = None,
    search_options: SearchOptions | None = None,
    *,
    evaluations: int | None = None,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Search for the best values of a recipe's marks, and submit the best candidate.

    Nothing but that is published. The same call goes on with a search that was stopped, and evaluates nothing
    twice.

    Args:
        options: of the merge of the best candidate; of those that evaluators make too, as far as it concerns
            one process.
        evaluations: at most so many candidates, in place of what the recipe says.

    Raises:
        RecipeError, PlanError: as ``plan_search``.
        SearchError: no candidate could be evaluated, or the servers did not get the best one.
        TargetError: the output place is taken, or trials of another search are beside it.
        RaymergeError: as ``submit``."""
    chosen, emit = options or RunOptions(), on_event or (lambda _: None)
    place = place_of(output, chosen)
    planned = plan_search(recipe, place, chosen, evaluations=evaluations)

    def check_place() -> None:
        MergeJob(planned.merges, place, chosen, on_event=emit).check()

    directory, how = search_directory(place, chosen), search_options or SearchOptions()
    job = SearchJob(planned.search, directory, chosen, how, on_event=emit, before_first=check_place)
    trials = job.carry_out()
    best = best_first(trials)[0]
    assert best.score is not None
    emit(SearchEnded(best.number, dict(best.values), best.score, len(trials)))
    text = with_trials(planned.search.marked.candidate(best.values).text, planned.search, trials)
    recipes = parse_recipes(text)
    run = MergeJob(plan_for(recipes, place, chosen), place, chosen, on_event=emit).run
    if run.is_published():
        emit(OutputKept(shown(str(place))))
        made = run.published_result()
    else:
        made = submit(recipes, place, chosen, on_event=emit)
    finish_search(planned.search, text, directory, chosen)
    return SearchResult(planned.search, made, best, trials)


def conversion(
    model: str | Path, to: str | Sequence[str] = "same", *, layout: str | Path | None = None
) -> AnyRecipe:
    """The recipe that converts one model to other formats, for ``plan`` and ``submit``.

    ``to`` is a format of ``out_format``, or several ``SELECTOR:FORMAT`` of which the first that matches a
    tensor holds; a selector is a role or a glob. ``layout`` is a training checkpoint in whose files and
    chunks the model is written; None for safetensors. RecipeError with all faults."""
    formats = (to,) if isinstance(to, str) else to
    return conversion_recipe(str(model), formats, layout=None if layout is None else str(layout))


def transplantation(
    model: str | Path,
    donor: str | Path,
    approximation: str = "omp",
    *,
    k: int | None = None,
    pad_to_multiple_of: int | None = None,
) -> AnyRecipe:
    """The recipe that gives a model the vocabulary of another, for ``plan`` and ``submit``.

    ``approximation`` is ``omp``, ``subword`` or ``mean``; ``k`` the tokens that ``omp`` makes a row of.
    RecipeError with all faults."""
    settings = {"approximation": approximation, "k": k, "pad_to_multiple_of": pad_to_multiple_of}
    return transplant_recipe(str(model), str(donor), settings)


def merge_adapters(
    recipe: RecipeLike,
    output: str | Path,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent | None = None,
) -> Combination:
    """Merge the adapters of a recipe into one that peft loads; the same call resumes an unfinished run.

    It runs in this process unless the options name several workers or a cluster.

    Args:
        recipe: its ``models`` are adapters of one model, directories or Hub names; an ``adapter`` block
            says how the result becomes factors.
        output: directory of the new adapter.

    Raises:
        RecipeError: the recipe is not valid, or the file holds several.
        PlanError: the recipe does not fit these adapters; all reasons.
        NonFiniteError: a factor has NaN or infinity.
        TargetError: something is at the output place that is not to be replaced.
        RaymergeError: as ``submit``."""
    began = time.monotonic()
    draft = _draft(recipe)
    if draft.problems:
        theirs = [plan_adapters(one, UNFETCHED).plan for one in draft.recipes if isinstance(one, Recipe)]
        raise RecipeError(in_order([*draft.problems, *(each for one in theirs for each in one.problems)]))
    asked = _only(draft.recipes)
    if not isinstance(asked, Recipe):
        what = "this recipe makes a mixture of experts, and no adapter."
        raise PlanError(Problem(asked.where("experts"), what, "Use 'submit'."))
    chosen, place = options or RunOptions(), output_directory(output)
    if chosen.address is None and chosen.workers in (None, 1):
        # Most merges of adapters take less time than it takes to start workers.
        chosen = replace(chosen, inline=True)
    commits = NO_COMMITS if chosen.replace else commits_begun([asked], place, steps_directory(place))
    lookup = Lookup(options=chosen.storage, commits=commits)
    with Journal(on_event or (lambda _: None)) as emit:
        merge = plan_adapters(asked, lookup, version=version("raymerge"))
        run = AdapterRun(merge, place, chosen, on_event=emit, began=began, journal=emit)
        run.check()
        with _started(chosen, emit, parts=run.num_units) as pool:
            return run.carry_out(pool)


def merges_adapters(recipes: RecipesLike) -> bool:
    """Whether ``merge_adapters`` applies rather than ``submit``: one recipe with an ``adapter`` block, or
    with two or more models that all are local directories of adapters. Invalid recipes count as far as
    readable; nothing is downloaded."""
    return _of_adapters(_draft(recipes).recipes) is not None


def verify(path: str | Path) -> Verdict:
    return verify_structure(place_of(path, RunOptions()))


def push(
    path: str | Path,
    repository: str,
    *,
    public: bool = False,
    replace: bool = False,
    progress_bars: bool = False,
) -> Pushed:
    """Verify what ``submit`` published in a directory, and push it to ``ORG/NAME`` on the Hub as one commit.

    What an earlier call uploaded is not uploaded again. ``public``: of a repository that is made;
    ``replace``: other content of the repository gives way; ``progress_bars``: those of the Hub's client.

    Raises UserError, of which ``problems`` says why it is refused; IncompleteError: the same call goes on."""
    target = PushTarget(repository, public, replace)
    return push_checkpoint(path, target, shows_bars=progress_bars)


def audit(
    path: str | Path,
    audit_options: AuditOptions | None = None,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent | None = None,
) -> AuditVerdict:
    """Audit a checkpoint made by raymerge: structure, every byte against the digests of its ledger, and
    samples of every tensor, recomputed from the sources by an independent slow path, on CPUs.

    Raises:
        RaymergeError: the audit failed. Problems of the checkpoint are in the verdict."""
    chosen, emit = replace(options or RunOptions(), device="cpu"), on_event or (lambda _: None)
    prepared = Audit(place_of(path, chosen), audit_options or AuditOptions(), chosen, on_event=emit)
    if not prepared.num_parts:
        return prepared.carry_out(_pool(chosen, emit, parts=1))
    with _started(chosen, emit, parts=prepared.num_parts) as pool:
        return prepared.carry_out(pool)


def suggest_recipe(
    models: Sequence[str | Path], *, moe: bool = False, storage: StoreOptions = NO_OPTIONS
) -> Suggestion:
    """A first recipe for some models, adapters, or a model and adapters; ``suggestion_text`` writes it.

    Reads headers, configs, tokenizers and model cards, of the Hub too, and no weights. ``moe``: build a
    mixture of experts of dense models.

    Raises:
        CheckpointError: a model is absent, broken or unsupported.
        PlanError: they do not fit each other, with every problem that a plan of the recipe would have."""
    lookup = Lookup(options=storage)
    named = arranged(read_models([parsed_model(str(each)) for each in models], lookup))
    suggestion = choose(named, moe=moe)
    guess = suggestion.guess
    candidates: list[Suggestion] = []
    if guess is not None and not guess.is_named and suggestion.kind is not Kind.ADAPTERS:
        base = find_base(guess.name, lookup)
        candidates += [] if base is None else variants(choose(named, moe=moe, base=base))
    problems: tuple[Problem, ...] = ()
    for each in (*candidates, *variants(suggestion)):
        own = _suggestion_problems(each, lookup)
        if not own:
            return each
        problems = own if each is suggestion else problems
    raise PlanError(problems)


def _suggestion_problems(suggestion: Suggestion, lookup: Lookup) -> tuple[Problem, ...]:
    """Problems that a plan of the suggested recipe has, from what is opened already."""
    # As a mapping, so that problems name its fields: nobody sees the lines of a text that is not written.
    recipe = recipe_from_mapping(yaml.safe_load(suggestion_text(suggestion)))
    if suggestion.kind is Kind.ADAPTERS:
        assert isinstance(recipe, Recipe)
        return plan_adapters(recipe, lookup).plan.problems
    opened = {(own.reference.path, own.reference.revision): own.checkpoint for own in suggestion.everyone}

    def opener(reference: ModelReference) -> Checkpoint:
        checkpoint = opened[reference.path, reference.revision]
        assert checkpoint is not None
        return checkpoint

    try:
        return plan_merges([recipe], Path(), version=version("raymerge"), opener=opener)[-1].plan.problems
    except PlanError as error:
        return error.problems


def diagnose(
    place: str = ".", *, profile: Profile | None = None, address: str | None = None
) -> tuple[Check, ...]:
    """What would hinder a merge: this machine, the place, and the cluster that address or profile name.

    Nothing is waited for without a limit. Raises OptionError: profile and address contradict each other."""
    from raymerge.deploy.targets.target import choose as choose_target
    from raymerge.diagnosis.diagnosis import diagnose as examine_all

    where = choose_target(profile, None, address)
    return tuple(examine_all(where, [place], os.environ))


def _draft(recipes: RecipesLike) -> Draft:
    """The recipes in file order as far as readable, with their faults."""
    return with_order_problems(_draft_all(recipes), os.path.isdir)


def _draft_all(recipes: RecipesLike, name: str = "recipe") -> Draft:
    """As ``_draft``; ``name`` is used in messages for a recipe without a file."""
    if isinstance(recipes, Recipe | MoeRecipe | ExpertSetRecipe):
        return Draft((recipes,), names=(recipes.name,) if recipes.name is not None else ())
    if isinstance(recipes, Mapping):
        return _with_unused(draft_mapping(recipes, name))
    if isinstance(recipes, str | Path):
        return _with_unused(draft_recipes(Path(recipes)))
    if not recipes:
        what = "there is none in the sequence."
        return Draft((), (Problem("recipes", what, "Give at least one recipe."),))
    return join_drafts(_draft_all(each, f"recipes[{index}]") for index, each in enumerate(recipes))


def _with_unused(draft: Draft) -> Draft:
    """A draft with the problems of what it says in vain. Candidates of a sweep or a search may differ in
    what they use."""
    partial = {id(recipe) for recipe in draft.partial}
    whole = (recipe for recipe in draft.recipes if id(recipe) not in partial)
    unused = [each for recipe in whole for each in unused_calibration(recipe)]
    unused = [each for each in unused if each.where not in draft.guessed]
    return replace(draft, problems=in_order((*draft.problems, *unused)))


def _draft_sweep(recipes: RecipesLike, options: RunOptions) -> SweepDraft | None:
    lookup = Lookup(options=options.storage)

    def recipe_text(place: str) -> str:
        with open_store(resolve_source(place, lookup=replace(lookup, fetches=False))) as store:
            where = store.location(PROVENANCE_FILE)
            return Provenance.from_json(read_record(store, PROVENANCE_FILE), where).recipes[-1]

    files = run_files(lookup, recipe_text)
    if isinstance(recipes, Mapping):
        return draft_sweep_mapping(recipes, files=files)
    return draft_sweep(recipes, files=files) if isinstance(recipes, str | Path) else None


def _sweep_problems(
    draft: SweepDraft, lookup: Lookup, opened: dict[tuple[object, ...], Checkpoint]
) -> tuple[Problem, ...]:
    """All problems of outputs that cannot be read as a whole, their models included."""
    each = [
        draft_problems(own, Path(), version=version("raymerge"), lookup=lookup, opened=opened)
        for own in draft.drafts
    ]
    return in_order([*draft.problems, *joined_problems(draft.values, each)])


def _of_adapters(recipes: Sequence[AnyRecipe]) -> Recipe | None:
    recipe = recipes[0] if len(recipes) == 1 else None
    if not isinstance(recipe, Recipe):
        return None
    models = recipe.models
    # One adapter alone stands where a model is needed: planning says how to name it together with its model.
    is_implied = len(models) > 1 and all(_names_adapter(entry.model) for entry in models)
    return recipe if is_implied or recipe.adapter is not None else None


def _names_adapter(reference: ModelReference) -> bool:
    # os.path and not pathlib, which raises on names too long for the file system.
    directory = os.path.expanduser(reference.path)
    return reference.lora_path is None and os.path.isdir(directory) and is_adapter(directory)


def _no_plan(recipe: Recipe) -> Problem:
    return Problem(
        recipe.where("models" if recipe.adapter is None else "adapter"),
        "this recipe merges adapters into one adapter, which is done at once and has no plan.",
        "Use 'raymerge submit' without --dry-run; in Python, 'merge_adapters'. To merge models that have "
        "these adapters on them, name each as MODEL+ADAPTER.",
    )


def _no_sweep(recipe: Recipe) -> Problem:
    return Problem(
        recipe.where("models" if recipe.adapter is None else "adapter"),
        "this recipe merges adapters into one adapter, of which there is no sweep.",
        "Submit a recipe without 'sweep' for each adapter. To merge models that have these adapters on them, "
        "name each as MODEL+ADAPTER.",
    )


def _pool(options: RunOptions, emit: OnEvent, *, parts: int | None) -> Pool:
    if options.inline:
        from raymerge.runtime.workers.pool import InlinePool

        return InlinePool(options.device, options.threads, on_event=emit)
    from raymerge.runtime.workers.ray_pool import RayPool

    return RayPool(options, emit, parts=parts)


@contextmanager
def _started(options: RunOptions, emit: OnEvent, *, parts: int | None) -> Iterator[Pool]:
    pool = _pool(options, emit, parts=parts)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()
