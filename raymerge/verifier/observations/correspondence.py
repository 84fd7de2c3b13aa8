"""Which layers and experts of one model are those of another, from sketches of their tensors.

A sketch is a random projection: the cosine of two is that of the tensors, with an error of about
``1 / sqrt(SKETCH)``. Put one after the other, those of a layer or an expert are as good as one long sketch.
Models are numbered as in ``Measurements.sketches``: the parents, and the base last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from raymerge.architectures.rules import Role
from raymerge.verifier.measurements import SKETCH, Floats, Label, Measurements

Moved = Mapping[int, int]
"""Places where a model has not the reference's layer or expert of this number, and the number that it has."""
_Place = TypeVar("_Place", bound=Hashable)
_MATCH = 0.8
"""Above what chance gives: the largest of 400 cosines of 24 random numbers is about 0.75."""
_LOST = 0.5
"""Below what training gives: a model that moved by its own norm is still at 0.7."""
_FEWEST_NUMBERS = 3 * SKETCH
_AKIN = 0.9
"""Above what chance gives the cosine of two single sketches."""


def is_matrix(label: Label) -> bool:
    """Whether models that were trained apart differ in it: norms are near 1 in all of them."""
    return label.role != Role.NORM and "norm" not in label.part and not label.part.endswith("bias")


def kind_of(label: Label) -> str:
    """The name of the part without layer and expert: the same for its like in other layers."""
    head = f"{label.stack}." if label.stack else ""
    name = label.part.removeprefix(f"{head}{label.layer}.") if label.layer >= 0 else label.part
    return name.replace(f"experts.{label.expert}.", "experts.*.") if label.expert >= 0 else name


def related(measured: Measurements) -> Mapping[str, Floats]:
    """By role: cosines of the weights of each two models, all matrices counting alike: ``[P + 1, P + 1]``.

    Of fewer than three matrices nothing can be said."""
    rows = _rows_by(measured, lambda each: str(each.role) if is_matrix(each) else None)
    of_models = {
        role: _scaled(measured.sketches[indices]).swapaxes(0, 1)
        for role, indices in rows.items()
        if len(indices) * SKETCH >= _FEWEST_NUMBERS
    }
    return {role: _cosines(sketches, sketches) for role, sketches in of_models.items()}


def weight_cosines(measured: Measurements, by_role: Mapping[str, Floats]) -> Floats:
    """Of the role in which two models are most alike, since experts may be in another order or trained
    apart; one of fewer than three matrices, such as the embedding, counts where they are nearly equal."""
    few = _rows_by(measured, lambda e: e.role if is_matrix(e) and e.role not in by_role else None)
    scaled = [_scaled(measured.sketches[rows]).swapaxes(0, 1) for rows in few.values()]
    nearly = [np.where(each > _AKIN, each, np.nan) for each in (_cosines(each, each) for each in scaled)]
    unknown = np.full((measured.num_parents + 1, measured.num_parents + 1), np.nan)
    return np.asarray(np.fmax.reduce([*by_role.values(), *nearly, unknown]))


def moved_layers(measured: Measurements, model: int, reference: int) -> Mapping[str, Moved]:
    """By stack; experts, which may be in another order, are not looked at."""
    models = (model, reference)
    rows = _rows_by(
        measured, lambda each: each.stack if each.layer >= 0 > each.expert and is_matrix(each) else None
    )
    doubtful = _doubtful(measured, rows, models)
    by_stack = {stack: _moved(measured, rows[stack], lambda each: each.layer, models) for stack in doubtful}
    return {stack: moved for stack, moved in by_stack.items() if moved}


def moved_experts(measured: Measurements, model: int, reference: int) -> Mapping[int, Moved]:
    """By layer."""
    models = (model, reference)
    rows = _rows_by(measured, lambda each: (each.stack, each.layer) if each.expert >= 0 else None)
    doubtful = _doubtful(measured, rows, models)
    by_layer = {at[1]: _moved(measured, rows[at], lambda each: each.expert, models) for at in doubtful}
    return {layer: moved for layer, moved in by_layer.items() if moved}


def _doubtful(
    measured: Measurements, rows: Mapping[_Place, list[int]], models: tuple[int, int]
) -> list[_Place]:
    """Where not all tensors are alike. It is a quick look, so that sound models take no time."""
    first, second = (measured.sketches[:, model] for model in models)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    is_like = np.einsum("nc,nc->n", first, second) >= _LOST * norms
    return [place for place, indices in rows.items() if not is_like[indices].all()]


def moved_rows(own: Sequence[float], nearest: Sequence[int], cosines: Sequence[float]) -> Moved:
    """The same of the rows of a router, from their cosines."""
    places = range(len(own))
    moved = {row: nearest[row] for row in places if own[row] < _LOST < _MATCH < cosines[row]}
    return moved if _is_order(moved, sum(each < _LOST for each in own)) else {}


def _is_order(moved: Moved, num_lost: int) -> bool:
    """Whether it is another order, and not likeness by chance: most of what is lost is found, each once."""
    return 2 * len(moved) > num_lost and len(set(moved.values())) == len(moved)


def _rows_by(measured: Measurements, key: Callable[[Label], _Place | None]) -> Mapping[_Place, list[int]]:
    rows = defaultdict[_Place, list[int]](list)
    for index, label in enumerate(measured.labels):
        place = key(label)
        if place is not None:
            rows[place].append(index)
    return rows


def _moved(
    measured: Measurements, rows: Sequence[int], place_of: Callable[[Label], int], models: tuple[int, int]
) -> Moved:
    labels = [measured.labels[row] for row in rows]
    places = sorted({place_of(label) for label in labels})
    # Only sketches of equally many elements are projected alike.
    keys = [(kind_of(label), measured.elements[row]) for label, row in zip(labels, rows, strict=True)]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    if len(number) * SKETCH < _FEWEST_NUMBERS:
        return {}
    table = np.zeros((measured.num_parents + 1, len(places), len(number), SKETCH))
    at = {place: index for index, place in enumerate(places)}
    where = [at[place_of(label)] for label in labels], [number[key] for key in keys]
    table[:, where[0], where[1]] = _scaled(measured.sketches[list(rows)]).swapaxes(0, 1)
    cosines = np.nan_to_num(_cosines(table[models[0]], table[models[1]]), nan=-1.0)
    own, nearest, best = np.diagonal(cosines), cosines.argmax(1), cosines.max(1)
    is_moved = (own < _LOST) & (best > _MATCH)
    moved = {places[index]: places[nearest[index]] for index in np.flatnonzero(is_moved)}
    return moved if _is_order(moved, int((own < _LOST).sum())) else {}


def _scaled(sketches: Floats) -> Floats:
    """``[n, M, SKETCH]``, each by its tensor's largest norm, so that none outweighs others."""
    norms = np.linalg.norm(sketches, axis=-1)
    largest = norms.max(1, initial=0)
    scaled = sketches / np.where(largest > 0, largest, 1)[:, None, None]
    return np.asarray(np.where(np.isfinite(norms)[..., None], scaled, 0))


def _cosines(first: Floats, second: Floats) -> Floats:
    """Of each two places ``[L, T, SKETCH]``, over the tensors that both have; NaN where they share none."""
    squares = [np.einsum("ltc,ltc->lt", each, each) for each in (first, second)]
    here = [each > 0 for each in squares]
    norms = np.sqrt((squares[0] @ here[1].T) * (here[0] @ squares[1].T))
    dots = np.tensordot(first, second, axes=([1, 2], [1, 2]))
    return np.asarray(np.where(norms > 0, dots / np.where(norms > 0, norms, 1), np.nan))
