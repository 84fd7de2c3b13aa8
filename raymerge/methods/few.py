"""A few sources of bfloat16 as the compiled loops take them that have all sources of an element at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raymerge.methods.method import Stored

if TYPE_CHECKING:
    from raymerge.kernels.elect import Sum
    from raymerge.kernels.elect_stored import FewInputs, Numbers


def few_inputs_of(stored: Stored) -> FewInputs | None:
    """The stored elements of base and sources; None where they are more than a few."""
    from raymerge.kernels import elect_stored

    if len(stored.places) > 1 + elect_stored.MOST:
        return None
    return elect_stored.FewInputs(stored.words, tuple(stored.places.astype(np.uint64)), stored.start)


def few_numbers_of(how: Sum) -> Numbers:
    """The numbers that go with the terms of a few sources, of which nothing is picked by size or chance."""
    from raymerge.kernels.elect_stored import Numbers

    none = (np.float32(np.nan),) * how.weights.size
    return Numbers(
        above=none,
        over=none,
        tied=none,
        level=none,
        factors=(np.float32(1.0),) * how.weights.size,
        coefficients=tuple(how.coefficients),
        shares=tuple(how.shares),
        weights=tuple(how.weights),
        factor=how.factor,
        elects=how.elects,
        divides=how.divides,
    )
