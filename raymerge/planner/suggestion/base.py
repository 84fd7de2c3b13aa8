"""Which model is the base of the others, by what their files say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymerge.planner.suggestion.models import Claim, NamedModel, Trust

_BASE_NAME = re.compile(r"(?:^|[-_. ])base(?:$|[-_. ])", re.IGNORECASE)
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BaseGuess:
    """The base of all models that are to be merged."""

    name: str
    is_named: bool
    """Whether it is among the models that were named."""
    reason: str
    """Who says so, as the end of a sentence: ``the model card of code``."""
    trust: Trust


def guess_base(models: Sequence[NamedModel]) -> BaseGuess | None:
    """A named model that all others come from; else a model that all of them say they come from."""
    parents = {model.name: own for model in models if (own := _parent(model, models)) is not None}
    for base in models:
        others = [model for model in models if model is not base]
        if others and all(_root(model, parents, models) is base for model in others):
            return _guess(base.name, {each.name: parents[each.name] for each in others}, is_named=True)
    claims = {name: claim for name, claim in parents.items() if meant_by(claim.base, models) is None}
    if len(claims) == len(models) and len({claim.base.lower() for claim in claims.values()}) == 1:
        return _guess(next(iter(claims.values())).base, claims, is_named=False)
    return None if claims else _by_name(models)


def meant_by(text: str, models: Sequence[NamedModel]) -> NamedModel | None:
    """The model that a claim is about: by its whole name, else by its last part, since models are copied to
    other directories."""
    whole = text.rstrip("/").lower()
    for name in (whole, whole.rpartition("/")[2]):
        called = [model for model in models if name in model.names]
        if len(called) == 1:
            return called[0]
    return None


def _parent(model: NamedModel, models: Sequence[NamedModel]) -> Claim | None:
    """The model's best claim: one about a named model before others, then the most trustworthy."""
    foreign = [claim for claim in model.claims if meant_by(claim.base, [model]) is None]
    named = [claim for claim in foreign if meant_by(claim.base, models) is not None]
    return max(named or foreign, key=lambda claim: claim.trust, default=None)


def _root(model: NamedModel, parents: Mapping[str, Claim], models: Sequence[NamedModel]) -> NamedModel:
    """The named model at the beginning of the chain that a model is the end of."""
    seen: list[NamedModel] = []
    while model not in seen:
        seen.append(model)
        claim = parents.get(model.name)
        model = (None if claim is None else meant_by(claim.base, models)) or model
    return model


def _by_name(models: Sequence[NamedModel]) -> BaseGuess | None:
    called = [model for model in models if _BASE_NAME.search(model.title)]
    if len(called) != 1 or len(models) < 2:
        return None
    return BaseGuess(called[0].name, is_named=True, reason="its name alone", trust=Trust.GUESS)


def _guess(name: str, claims: Mapping[str, Claim], *, is_named: bool) -> BaseGuess:
    words = [
        f"{source} of {_listed([each for each, claim in claims.items() if claim.told_by == source])}"
        for source in dict.fromkeys(claim.told_by for claim in claims.values())
    ]
    return BaseGuess(name, is_named, " and ".join(words), min(claim.trust for claim in claims.values()))


def _listed(names: Sequence[str]) -> str:
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    more = len(short) - _MOST_SHOWN
    return ", ".join(short[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
