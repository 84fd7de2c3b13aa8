"""The merges of ``raymerge.kernels.elect_stored_part`` of a few deltas thinned by rank.

The terms of a chunk are found delta after delta; what is made of those of an element stays in registers, as
in ``raymerge.kernels.elect_stored``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.bf16 import CHUNK, rounded, widened
from raymerge.kernels.elect_stored import FewInputs, Numbers
from raymerge.kernels.elect_stored_part import Ranked, write_factors
from raymerge.kernels.jit import compiled, inlined


@compiled
def merge_ranked_few(inputs: FewInputs, ranked: Ranked, numbers: Numbers, out: NDArray[np.uint16]) -> None:
    """Write what ``elect_stored.merge_ranked_stored`` writes."""
    length, words, places = ranked.tables.shape[1], inputs.words, inputs.places
    chunk = max(1, CHUNK // length) * length
    delta, terms = np.empty(chunk, np.float32), np.empty((len(numbers.weights), chunk), np.float32)
    for begin in range(0, out.size, chunk):
        size, first = min(chunk, out.size - begin), np.uint64(begin)
        bases, results = words[places[0] + first :][:size], out[begin : begin + size]
        for source in range(len(numbers.weights)):
            own, term = words[places[source + 1] + first :][:size], terms[source, :size]
            for i in range(size):
                delta[i] = widened(own[i]) - widened(bases[i])
            write_factors(delta[:size], ranked, source, inputs.start + begin, term)
            coefficient = numbers.coefficients[source]
            for i in range(size):
                term[i] = term[i] * delta[i] * coefficient
        if numbers.elects:
            _merge_elected(bases, terms, numbers, results)
        else:
            _merge(bases, terms, numbers, results)


@inlined
def _merge(
    bases: NDArray[np.uint16], terms: NDArray[np.float32], numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """Write the base plus the factor times the sum of the terms."""
    weights, zero = numbers.weights, np.float32(0.0)
    for i in range(out.size):
        total = zero
        for source in range(len(weights)):
            total += terms[source, i]
        out[i] = rounded(widened(bases[i]) - (-(total * numbers.factor) + zero))


@inlined
def _merge_elected(
    bases: NDArray[np.uint16], terms: NDArray[np.float32], numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """Write the base plus the factor times the sum of the terms that have the sign of all."""
    shares, weights, zero, one = numbers.shares, numbers.weights, np.float32(0.0), np.float32(1.0)
    for i in range(out.size):
        votes, merged, divisor = zero, zero, zero
        for source in range(len(weights)):
            votes += terms[source, i]
        for source in range(len(weights)):
            term = terms[source, i]
            # NaN makes NaN of the votes, and passes as not negative, like them.
            agreeing = (term if (term < zero) == (votes < zero) else zero) * shares[source]
            merged += agreeing
            divisor += weights[source] if agreeing != zero else zero
        if numbers.divides:
            merged = merged / (divisor if divisor != zero else one)
        out[i] = rounded(widened(bases[i]) - (-(merged * numbers.factor) + zero))
