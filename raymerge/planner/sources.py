"""The sources of a recipe, opened: each distinct model reference once, in recipe order.

This is the reading half of planning. It reads headers and configs only, with one exception: a checkpoint that
declares tied embeddings and stores the head all the same is compared byte for byte, because nothing else
tells whether dropping that head would lose weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from raymerge.architectures import Rules, Stack, TiedPair, load_rules, module_of, stacks, tied_pair
from raymerge.architectures.sections import class_names
from raymerge.checkpoints.adapters import Adapter, open_adapter
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, WeightFile, open_checkpoint, same_bytes
from raymerge.errors import PlanError, Problem, UserError
from raymerge.planner.collector import collector_paused
from raymerge.planner.pickled import read_pickled
from raymerge.planner.raw import names_file, open_raw, raw_problems
from raymerge.recipes import AnyRecipe, ModelReference, Recipe, references
from raymerge.storage.addresses import is_remote
from raymerge.storage.resolve import USUAL, Lookup, resolve_source

if TYPE_CHECKING:
    from raymerge.planner.stages import Prepared

Path_ = tuple[str | int, ...]

_CHOOSING = frozenset({"methods", "router"})
# Keys below which models are chosen that are named elsewhere.
_NOT_MERGED = _CHOOSING | {"tokenizer", "tokenizer_source"}
# Keys below which models are named that are merged only if they are named elsewhere too.


@dataclass(frozen=True, slots=True)
class Source:
    """One distinct model of the recipe, with its headers."""

    index: int
    """Position among the recipe's distinct models; the first is 0."""
    reference: ModelReference
    """What the recipe calls it."""
    checkpoint: Checkpoint
    """Its headers and config."""
    adapter: Adapter | None
    """What is laid over it."""
    rules: Rules
    """Naming rules of its family."""
    stacks: tuple[Stack, ...]
    """Its layer stacks."""
    pair: TiedPair | None
    """Its language-model head and embedding, where it has them."""
    stored_head_is_embedding: bool
    """True when the stored head was found byte-equal to the embedding that the config ties it to."""
    prepared: tuple[Prepared, ...] = ()
    """Results of stages that are read with it: aligned experts, router rows."""

    @property
    def name(self) -> str:
        """The reference as text, for messages."""
        return self.checkpoint.name

    @property
    def model_type(self) -> str:
        """``model_type`` of the config, or "" where it is silent."""
        return str(self.checkpoint.config.get("model_type") or "")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names that the config, or the recipe's override, gives this model."""
        override = self.reference.override_architecture
        return (override,) if override else class_names(self.checkpoint.config)

    def layer_stack(self, module: str | None) -> Stack | None:
        """The one stack of layers that a slice of this module counts, or None where there is no such one."""
        if module in (None, "default"):
            return next((stack for stack in self.stacks if stack.is_main), None)
        config = self.checkpoint.config
        own = [s for s in self.stacks if module_of(f"{s.prefix}.0.weight", config, self.stacks) == module]
        return own[0] if len(own) == 1 else None


class Holding(Protocol):
    """Files that a plan reads from: those of a model, of an adapter, or of a stage's result."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def root(self) -> str:
        """Its directory."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor as it lies in its file, by name."""

    @property
    def files(self) -> Sequence[WeightFile]:
        """The files that hold the tensors."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that the tensor of a name consists of."""

    def whole(self, stored: str) -> str:
        """Name of the tensor that a stored one is, or belongs to."""


def holdings(sources: Sequence[Source]) -> tuple[Holding, ...]:
    """Everything that a plan over these sources may read from, by its index there.

    Models come first, then adapters, then what stages prepared.
    """
    models: list[Holding] = [source.checkpoint for source in sources]
    adapters = (source.adapter for source in sources if source.adapter is not None)
    return (*models, *adapters, *(each for source in sources for each in source.prepared))


def reads_far(sources: Sequence[Source]) -> bool:
    """Whether a plan over these sources reads from servers."""
    return any(is_remote(each.root) for each in holdings(sources))


Opener = Callable[[ModelReference], Checkpoint]


def open_reference(reference: ModelReference, *, pickled: bool = False, lookup: Lookup = USUAL) -> Checkpoint:
    """Open the model that a reference names, without its adapter.

    Args:
        reference: a local directory, a Hub repository, a local file of tensors, or an address.
        pickled: whether weights may be read that are pickled.
        lookup: how it is found.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    if names_file(reference) and not is_remote(reference.path):
        return open_raw(reference.path, str(reference), revision=reference.revision, pickled=pickled)
    root = resolve_source(reference.path, reference.revision, pickled=pickled, lookup=lookup)
    if is_remote(root) and names_file(ModelReference(root)):
        return open_raw(root, str(reference), revision=None, pickled=pickled)
    return open_checkpoint(root, str(reference), read_pickle=read_pickled if pickled else None)


def opener_of(recipe: AnyRecipe, lookup: Lookup = USUAL) -> Opener:
    """How a recipe has its models opened."""
    return partial(open_reference, pickled=recipe.pickled_weights == "read", lookup=lookup)


def open_sources(
    recipe: AnyRecipe, *, opener: Opener | None = None, lookup: Lookup = USUAL
) -> tuple[Source, ...]:
    """Open every distinct model of a recipe, in recipe order, reporting all that fails at once.

    Models of which only the tokenizer is taken come last.

    Args:
        recipe: what is asked.
        opener: how models are opened; None for the recipe's own way.
        lookup: how adapters are found, and models too where the opener is the recipe's own.

    Raises:
        PlanError: one or more models cannot be read, or files of tensors stand where models are needed; each
            problem names the model and its place.
    """
    with collector_paused():
        sources, failures = _opened(recipe, opener or opener_of(recipe, lookup), lookup)
    problems = [_placed(each, place) for place, error in failures for each in error.problems]
    problems += raw_problems(recipe, {source.reference: source.checkpoint for source in sources})
    if problems:
        raise PlanError(problems) from next((error for _, error in failures), None)
    return tuple(sources)


def _opened(
    recipe: AnyRecipe, opener: Opener, lookup: Lookup
) -> tuple[list[Source], list[tuple[str, UserError]]]:
    """The models that can be opened, and what is wrong with the others, each with its place in the recipe."""
    sources: list[Source] = []
    failures: list[tuple[str, UserError]] = []
    opened: dict[ModelReference, int] = {}
    for path, reference in references(recipe):
        # Rules choose among models that are named elsewhere; others are refused in planning.
        if reference in opened or path[0] in _CHOOSING or path[:2] == ("trunk", "methods"):
            continue
        opened[reference] = len(sources)
        try:
            sources.append(_open(len(sources), reference, opener, lookup))
        except UserError as error:
            failures.append((recipe.where(*path), error))
    return sources, failures


def model_references(recipe: Recipe) -> Iterator[tuple[Path_, ModelReference]]:
    """Every model that is merged, with its path in the recipe: the base first, then in written order."""
    return ((path, each) for path, each in references(recipe) if path[0] not in _NOT_MERGED)


def _open(index: int, reference: ModelReference, opener: Opener, lookup: Lookup) -> Source:
    checkpoint = opener(reference)
    rules = load_rules(str(checkpoint.config.get("model_type") or "") or None)
    # What has no config ties nothing: in a file of tensors a head is a tensor like any other.
    pair = None if checkpoint.is_raw else tied_pair(checkpoint.tensors, checkpoint.config)
    return Source(
        index=index,
        reference=reference,
        checkpoint=checkpoint,
        adapter=_open_adapter(reference, lookup),
        rules=rules,
        stacks=stacks(checkpoint.tensors, checkpoint.config),
        pair=pair,
        stored_head_is_embedding=_stored_head_is_embedding(checkpoint, pair),
    )


def _open_adapter(reference: ModelReference, lookup: Lookup) -> Adapter | None:
    if reference.lora_path is None:
        return None
    root = resolve_source(reference.lora_path, reference.lora_revision, lookup=lookup)
    revision = f"@{reference.lora_revision}" if reference.lora_revision else ""
    return open_adapter(root, f"{reference.lora_path}{revision}")


def _stored_head_is_embedding(checkpoint: Checkpoint, pair: TiedPair | None) -> bool:
    if pair is None or not pair.declared or pair.head not in checkpoint.tensors:
        return False
    head, embedding = checkpoint.tensors[pair.head], checkpoint.tensors.get(pair.embedding)
    if embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    return same_bytes(checkpoint, head, embedding)


def _placed(problem: Problem, place: str) -> Problem:
    where = problem.where if problem.where.startswith(place) else f"{place}: {problem.where}"
    return Problem(where, problem.what, problem.remedy)
