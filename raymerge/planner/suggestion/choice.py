"""What kind of recipe fits the models that are named, and by which method."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from raymerge.errors import PlanError, Problem
from raymerge.planner.suggestion.base import BaseGuess, guess_base, meant_by
from raymerge.planner.suggestion.models import NamedModel, with_adapter


class Kind(StrEnum):
    MERGE = "merge"
    MIXTURE = "mixture"
    """Of experts, built of dense models."""
    ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class Suggestion:
    kind: Kind
    method: str
    """The ``merge_method``; of a mixture, the ``gate_mode``."""
    models: tuple[NamedModel, ...]
    """Those that are merged, or become experts."""
    base: NamedModel | None
    guess: BaseGuess | None
    """What is known of a base, also where it cannot be used."""
    has_shared_expert: bool = False
    """Whether the base's own feed-forward becomes an expert that every token goes through."""

    @property
    def everyone(self) -> tuple[NamedModel, ...]:
        """The base, if there is one, and the models; each once."""
        base = () if self.base is None or self.base in self.models else (self.base,)
        return (*base, *self.models)

    @property
    def donor(self) -> NamedModel:
        return self.base or self.models[0]


def arranged(models: Sequence[NamedModel]) -> tuple[NamedModel, ...]:
    """The models, each adapter on the one that it belongs to; adapters alone stay as they are.

    Raises PlanError: a model is named twice, or by a name that cannot be written; or it is not known which
    model an adapter belongs to."""
    if problems := list(_unfit_names(models)):
        raise PlanError(problems)
    adapters = [each for each in models if each.is_adapter]
    whole = [each for each in models if not each.is_adapter]
    if not whole:
        return tuple(models)
    owners = [(each, _owner(each, whole)) for each in adapters]
    if problems := [_no_owner(each) for each, owner in owners if owner is None]:
        raise PlanError(problems)
    return (*whole, *(with_adapter(owner, each) for each, owner in owners if owner is not None))


def choose(models: Sequence[NamedModel], *, moe: bool = False, base: NamedModel | None = None) -> Suggestion:
    """The kind of recipe and its method. ``base``: a base that was not named.

    Raises PlanError: too few models, or of kinds that are not merged with each other."""
    guess = guess_base(models)
    if problems := list(_misfits(models, moe=moe)):
        raise PlanError(problems)
    if models[0].is_adapter:
        return Suggestion(Kind.ADAPTERS, "linear", tuple(models), None, guess)
    if base is None and guess is not None:
        base = next((each for each in models if each.name == guess.name), None)
    rest = tuple(each for each in models if each is not base)
    if moe:
        return _mixture(models, base, guess)
    if base is not None:
        return Suggestion(Kind.MERGE, "ties" if len(rest) > 1 else "task_arithmetic", rest, base, guess)
    is_dense_pair = len(rest) == 2 and not any(each.num_experts or each.is_raw for each in rest)
    if is_dense_pair:
        return Suggestion(Kind.MERGE, "slerp", rest, rest[0], guess)
    return Suggestion(Kind.MERGE, "linear", rest, None, guess)


def _mixture(models: Sequence[NamedModel], base: NamedModel | None, guess: BaseGuess | None) -> Suggestion:
    if len(models) == 1:
        return Suggestion(Kind.MIXTURE, "random", tuple(models), models[0], guess)
    rest = tuple(each for each in models if each is not base)
    experts = rest if len(rest) > 1 else tuple(models)
    return Suggestion(Kind.MIXTURE, "router_input", experts, base or models[0], guess)


def variants(suggestion: Suggestion) -> tuple[Suggestion, ...]:
    """The suggestion, and what else may be planned where it cannot: some families of mixtures need a shared
    expert."""
    is_built = suggestion.kind is Kind.MIXTURE and suggestion.base is not None
    return (suggestion, *([replace(suggestion, has_shared_expert=True)] if is_built else []))


def _unfit_names(models: Sequence[NamedModel]) -> Iterator[Problem]:
    names = [each.name for each in models]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Problem(name, "this model is named twice.", "Name each model once.")
    places: dict[tuple[str, str | None], str] = {}
    for each in models:
        root = each.adapter.root if each.adapter is not None else ""
        root = each.checkpoint.root if each.checkpoint is not None else root
        first = places.setdefault((os.path.realpath(root), each.reference.lora_path), each.name)
        if first != each.name and not each.is_raw:
            yield Problem(each.name, f"this is the same directory as {first}.", "Name each model once.")
    for name in dict.fromkeys(names):
        if not name.isprintable():
            what = "its name holds characters that cannot stand in a recipe."
            yield Problem(ascii(name), what, "Rename the directory, or make a link to it.")


def _misfits(models: Sequence[NamedModel], *, moe: bool) -> Iterator[Problem]:
    if len(models) < 2 and not moe:
        kind = "adapter" if models[0].is_adapter else "model"
        what = f"one {kind} is named, and a merge needs two or more."
        remedy = "Name the others too. 'raymerge convert' stores one model in another format, and "
        yield Problem(models[0].name, what, f"{remedy}'raymerge init --moe MODEL' makes experts of it.")
    for each in models if moe else ():
        if each.is_adapter:
            what = "is an adapter, and experts are made of models."
            yield Problem(each.name, what, "Name it with its model: MODEL+ADAPTER.")


def _owner(adapter: NamedModel, models: Sequence[NamedModel]) -> NamedModel | None:
    if len(models) == 1:
        return models[0]
    return next((own for claim in adapter.claims if (own := meant_by(claim.base, models))), None)


def _no_owner(adapter: NamedModel) -> Problem:
    named = next((f" (it names {claim.base})" for claim in adapter.claims), "")
    what = f"is an adapter, and which of the models it belongs to is not known{named}."
    return Problem(adapter.name, what, "Name the two together: MODEL+ADAPTER.")
