"""How often a GPU is waited for: while the host waits, it begins nothing, and the GPU runs dry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from kits.counted_gpu import GPU, counted_waits
from kits.marks import slow_but
from kits.method_kit import Case, default_case, make_settings, merge, random_inputs, same_bits

from raymerge.methods import Access, Method, methods

SHAPE = (96, 1024)
TILES = ((), (1 << 14, 1 << 15, 1 << 16))
OPTIONS = {"density": 0.4, "reinit_fraction": 0.5}
"""Of sources, for passes that the defaults do without."""
VALUES = {"rescale": True, "select_topk": 0.3}
MOST = {"breadcrumbs": 2, "breadcrumbs_ties": 2, "ties": 2, "sce": 3, "arcee_fusion": 4}
"""Waits for a tensor of methods that select: for the sample and for what each pass has counted. The next pass
looks where the counts say, so that they have to be read. Other methods read the sums of one pass at most."""


def _case(method: Method) -> Case:
    case = default_case(method)
    names = {parameter.name for parameter in method.parameters}
    own = {name: value for name, value in OPTIONS.items() if name in names}
    values = {name: value for name, value in VALUES.items() if name in names}
    sources = tuple({**source, **own} for source in case.sources)
    return replace(case, values={**case.values, **values}, sources=sources)


def _waits(method: Method, cuts: Sequence[int]) -> int:
    case = _case(method)
    settings = make_settings(method, case, SHAPE)
    base, sources = random_inputs(len(case.sources), SHAPE, torch.bfloat16)
    base, sources = base.float(), [source.float() for source in sources]
    expected = merge(method, settings, base, sources, cuts)
    with counted_waits() as waits:
        distant = merge(method, settings, base.to(GPU), [source.to(GPU) for source in sources], cuts)
        total: int = waits.total()
        assert same_bits(distant.cpu(), expected)
    return total


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "method",
    slow_but(
        [each for each in methods().values() if each.access is not Access.MATRIX],
        *(each for each in methods().values() if each.name in (*MOST, "slerp", "dare_ties")),
    ),
    ids=lambda each: each.name,
)
def test_no_tile_waits_and_each_pass_at_most_once(method: Method) -> None:
    """Decompositions, which are of whole matrices, wait within."""
    found = [_waits(method, cuts) for cuts in TILES]
    assert (
        found[0]
        == found[1]
        <= MOST.get(method.name, method.kernel.passes(make_settings(method, _case(method), SHAPE)))
    )


def test_a_read_is_a_wait() -> None:
    values = torch.arange(6.0)
    with counted_waits() as waits:
        far = values.to(GPU)
        far.mul_(2.0).add_(far[2:3].clone())
        assert waits.total() == 0
        reads: list[Callable[[], object]] = [
            lambda: bool(far[0] > 0),
            far.sum().item,
            far.nonzero,
            lambda: far[far > 2],
            far.tolist,
        ]
        for number, read in enumerate(reads, 1):
            read()
            assert waits.total() == number
