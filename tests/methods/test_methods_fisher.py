"""MethodKit over Fisher merging, whose later sources are information about the earlier ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, merge, method_named, random_inputs, same_bits

FISHER = method_named("fisher")
WEIGHTS = (0.5, 2.0, 1.0)


def case(*weights: float, **values: float | bool) -> Case:
    sources = (*({"weight": weight} for weight in weights), *({} for _ in weights))
    return Case(values, sources, fixes_equal_inputs=False)


class TestFisher(MethodKit):
    name = "fisher"
    cases = (case(*WEIGHTS), case(1.0, 0.0, floor=0.5, root=True), case(0.3))
    scales = False
    is_symmetric = False

    def inputs(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        base, sources = random_inputs(count, shape, dtype)
        return base, [*sources[: count // 2], *(each**2 for each in sources[count // 2 :])]


@pytest.mark.parametrize("root", [False, True])
def test_it_is_the_mean_by_information(root: bool) -> None:
    chance = np.random.default_rng(3)
    models, information = chance.normal(size=(3, 50)), chance.exponential(size=(3, 50)) ** 4
    information[:, 7] = 0.0
    share = np.array(WEIGHTS)[:, None] * (np.sqrt(information + 0.01) if root else information + 0.01)
    expected = (share * models).sum(0) / share.sum(0)
    given = [torch.from_numpy(each).float() for each in (*models, *information)]
    settings = make_settings(FISHER, case(*WEIGHTS, root=root))
    found = merge(FISHER, settings, None, given).double().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # Of the element that no text says anything about: the mean by weight alone.
    assert found[7] == pytest.approx(np.average(models[:, 7], weights=WEIGHTS), rel=1e-5)


def test_equal_models_keep_their_bits() -> None:
    model, information = torch.tensor([-0.0, 0.1, 1e-30, -3.0]), torch.tensor([0.0, 1e-20, 1e20, 1.0])
    given = [model, model, model, information, 3.0 * information, 0.0 * information]
    assert same_bits(merge(FISHER, make_settings(FISHER, case(*WEIGHTS)), None, given), model)


def test_some_source_has_to_count() -> None:
    assert FISHER.check(make_settings(FISHER, case(0.0, 0.0))) is not None
