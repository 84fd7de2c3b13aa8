"""The sources of a recipe, opened: each distinct model reference once, in recipe order.

This is the reading half of planning. It reads headers and configs only, with one exception: a checkpoint that
declares tied embeddings and stores the head all the same is compared byte for byte, because nothing else
tells whether dropping that head would lose weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymerge.architectures import Rules, Stack, TiedPair, load_rules, module_of, stacks, tied_pair
from raymerge.architectures.sections import class_names
from raymerge.checkpoints.source import Checkpoint, open_checkpoint, same_bytes
from raymerge.errors import CheckpointError, PlanError, Problem, UserError
from raymerge.recipes import ModelEntry, ModelReference, OutputSlice, Recipe
from raymerge.storage.hub import resolve_model

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One distinct model of the recipe, with its headers."""

    index: int
    """Position among the recipe's distinct models; the first is 0."""
    reference: ModelReference
    """What the recipe calls it."""
    checkpoint: Checkpoint
    """Its headers and config."""
    rules: Rules
    """Naming rules of its family."""
    stacks: tuple[Stack, ...]
    """Its layer stacks."""
    pair: TiedPair | None
    """Its language-model head and embedding, where it has them."""
    stored_head_is_embedding: bool
    """True when the stored head was found byte-equal to the embedding that the config ties it to."""

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


Opener = Callable[[ModelReference], Checkpoint]


def open_reference(reference: ModelReference) -> Checkpoint:
    """Open the checkpoint that a reference names: a local directory, or a Hub repository.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    root = resolve_model(reference.path, reference.revision)
    return open_checkpoint(Path(root), str(reference))


def open_sources(recipe: Recipe, *, opener: Opener = open_reference) -> tuple[Source, ...]:
    """Open every distinct model of a recipe, in recipe order, reporting all that fails at once.

    Raises:
        PlanError: one or more models cannot be read; each problem names the model and its place.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    opened: dict[ModelReference, int] = {}
    for path, reference in model_references(recipe):
        if reference in opened:
            continue
        opened[reference] = len(sources)
        try:
            sources.append(_open(len(sources), reference, opener, place=recipe.where(*path)))
        except UserError as error:
            problems.extend(_placed(problem, recipe.where(*path)) for problem in error.problems)
    if problems:
        raise PlanError(problems)
    return tuple(sources)


def model_references(recipe: Recipe) -> Iterator[tuple[Path_, ModelReference]]:
    """Every model reference with its path in the recipe: the base first, then in written order."""
    if recipe.base_model is not None:
        yield ("base_model",), recipe.base_model
    yield from _references((), recipe.models, recipe.slices)
    for name, module in recipe.modules.items():
        yield from _references(("modules", name), module.models, module.slices)


def _references(
    path: Path_, models: Sequence[ModelEntry], slices: Sequence[OutputSlice]
) -> Iterator[tuple[Path_, ModelReference]]:
    for index, entry in enumerate(models):
        yield (*path, "models", index, "model"), entry.model
    for position, piece in enumerate(slices):
        for index, source in enumerate(piece.sources):
            yield (*path, "slices", position, "sources", index, "model"), source.model
        if piece.base_model is not None:
            yield (*path, "slices", position, "base_model"), piece.base_model


def _open(index: int, reference: ModelReference, opener: Opener, *, place: str) -> Source:
    if reference.lora_path is not None:
        raise CheckpointError(
            Problem(
                place,
                f"{reference} asks for an adapter on a model, which raymerge cannot apply yet.",
                "Merge the adapter into its model first and name the result here.",
            )
        )
    checkpoint = opener(reference)
    rules = load_rules(str(checkpoint.config.get("model_type") or "") or None)
    pair = tied_pair(checkpoint.tensors, checkpoint.config)
    return Source(
        index=index,
        reference=reference,
        checkpoint=checkpoint,
        rules=rules,
        stacks=stacks(checkpoint.tensors, checkpoint.config),
        pair=pair,
        stored_head_is_embedding=_stored_head_is_embedding(checkpoint, pair),
    )


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
