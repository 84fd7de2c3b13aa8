"""upcycle: the kit, the definition in numpy, and what makes experts of dense matrices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, merge, method_named, random_inputs, same_bits

from raymerge.methods import Access, Method, Settings, Value, random_key
from raymerge.methods.random import hashed
from raymerge.methods.reduce import PIECE
from raymerge.methods.upcycle import _limit

SHAPE = (48, 30)


def method() -> Method:
    found = method_named("upcycle")
    return found


def settings_of(shape: tuple[int, ...] = SHAPE, **values: Value) -> Settings:
    return make_settings(method(), Case(sources=(values,)), shape)


def made(source: torch.Tensor, **values: Value) -> torch.Tensor:
    return merge(method(), settings_of(tuple(source.shape), **values), None, [source])


def source_of(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return random_inputs(1, shape)[1][0]


def changed_lines(source: torch.Tensor, result: torch.Tensor, axis: int) -> list[int]:
    """Numbers of the rows (axis 0) or columns (axis 1) with any change; all of such a line is changed."""
    changed = (source != result).movedim(axis, 0).reshape(source.shape[axis], -1)
    assert torch.equal(changed.any(dim=1), changed.all(dim=1))
    return changed.any(dim=1).nonzero().flatten().tolist()


class TestUpcycle(MethodKit):
    name = "upcycle"
    scales = False
    cases = (
        Case(sources=({},)),
        Case(sources=({"scale": 0.25},), fixes_equal_inputs=False),
        Case(sources=({"noise_scale": 0.02},), fixes_equal_inputs=False),
        Case(sources=({"reinit_fraction": 0.5, "neuron_key": 3},), fixes_equal_inputs=False),
        Case(
            sources=({"reinit_fraction": 0.3, "neuron_axis": 1, "noise_scale": 0.1, "scale": 2.0},),
            fixes_equal_inputs=False,
        ),
        Case(
            sources=({"reinit_fraction": 0.5, "neuron_first": 7, "num_neurons": 200_000},),
            fixes_equal_inputs=False,
        ),
        Case(sources=({"reinit_fraction": 1.0, "scale": -0.5},), fixes_equal_inputs=False),
    )


# Against the definition -------------------------------------------------------------------------------


def test_scale_alone_by_hand() -> None:
    source = torch.tensor([[1.0, -2.0], [0.5, -0.0]])
    assert same_bits(made(source, scale=-4.0), torch.tensor([[-4.0, 8.0], [-2.0, 0.0]]))


def test_a_redrawn_part_of_one_value_keeps_it() -> None:
    """Its deviation is 0, so that the draw is its mean."""
    source = torch.full(SHAPE, 0.75)
    assert same_bits(made(source, reinit_fraction=0.5), source)


# Neurons ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9, 1.0])
def test_exactly_the_fraction_is_redrawn_and_the_rest_is_left_alone(axis: int, fraction: float) -> None:
    source = source_of()
    for key in range(8):
        result = made(source, reinit_fraction=fraction, neuron_axis=axis, neuron_key=key)
        assert len(changed_lines(source, result, axis)) == round(fraction * SHAPE[axis])


def test_gate_up_and_down_of_one_key_redraw_the_same_neurons() -> None:
    gate, down = source_of((48, 20)), source_of((20, 48))
    neurons = changed_lines(gate, made(gate, reinit_fraction=0.5, neuron_key=9), 0)
    assert neurons == changed_lines(down, made(down, reinit_fraction=0.5, neuron_key=9, neuron_axis=1), 1)
    wider = source_of((48, 33))
    assert neurons == changed_lines(wider, made(wider, reinit_fraction=0.5, neuron_key=9), 0)
    assert neurons != changed_lines(gate, made(gate, reinit_fraction=0.5, neuron_key=10), 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_the_neurons_choose_what_the_whole_chooses(axis: int) -> None:
    source = source_of((48, 48))
    whole = changed_lines(source, made(source, reinit_fraction=0.5, neuron_key=4, neuron_axis=axis), axis)
    found = []
    for first in range(0, 48, 12):
        part = source.narrow(axis, first, 12).contiguous()
        values = {"neuron_key": 4, "neuron_axis": axis, "neuron_first": first, "num_neurons": 48}
        result = made(part, reinit_fraction=0.5, **values)
        found += [first + line for line in changed_lines(part, result, axis)]
    assert found == whole


def test_what_is_redrawn_looks_like_what_it_replaces() -> None:
    source = 0.02 * random_inputs(1, (400, 500))[1][0] + 0.1
    result = made(source, reinit_fraction=0.5, neuron_key=1)
    rows = changed_lines(source, result, 0)
    before, after = source[rows].double(), result[rows].double()
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=5 * 0.02 / math.sqrt(100_000))
    assert float(after.std()) == pytest.approx(float(before.std()), rel=0.02)
    correlation = torch.corrcoef(torch.stack((before.flatten(), after.flatten())))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(100_000)


def test_statistics_are_those_of_the_replaced_part_alone() -> None:
    source = source_of()
    rows = changed_lines(source, made(source, reinit_fraction=0.5), 0)
    others = [row for row in range(SHAPE[0]) if row not in rows]
    changed = source.clone()
    changed[others] = torch.nan
    assert same_bits(made(changed, reinit_fraction=0.5)[rows], made(source, reinit_fraction=0.5)[rows])


@pytest.mark.parametrize(
    ("shape", "axis", "neurons"), [((), 0, 0), ((48,), 1, 0), ((48,), 0, 24), ((48, 3, 5), 1, 2)]
)
def test_shapes_that_are_no_matrix(shape: tuple[int, ...], axis: int, neurons: int) -> None:
    """What has no such axis has no neurons; of a convolution's weight whole slabs are redrawn."""
    source = source_of(shape)
    result = made(source, reinit_fraction=0.5, neuron_axis=axis)
    if neurons:
        assert len(changed_lines(source, result, axis)) == neurons
    else:
        assert same_bits(result, source)


def test_too_small_a_fraction_redraws_nothing() -> None:
    source = source_of()
    assert same_bits(made(source, reinit_fraction=0.01), source)


def test_neurons_beyond_their_number_are_refused() -> None:
    with pytest.raises(ValueError, match="the neurons 7 to 54 has more than 48"):
        made(source_of(), reinit_fraction=0.5, neuron_first=7, num_neurons=48)


@pytest.mark.parametrize(
    ("first", "num_neurons", "sentence"),
    [
        (0, 0, None),
        (0, 48, None),
        (12, 48, None),
        (48, 48, "neuron_first is 48 and must be below num_neurons, which is 48"),
        (12, 0, "neuron_first is 12 and must be below num_neurons, which is 0"),
    ],
)
def test_check(first: int, num_neurons: int, sentence: str | None) -> None:
    given_ = settings_of(neuron_first=first, num_neurons=num_neurons)
    assert method().check(given_) == sentence


# The choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 2, 30_000, 99_999, 100_000])
def test_more_neurons_than_are_held_at_once(wanted: int) -> None:
    assert 2 * PIECE < 100_000
    assert passed(77, 100_000, wanted) == wanted


def passed(key: int, num_neurons: int, wanted: int) -> int:
    """How many of the hashes reach up to the limit."""
    limit = _limit(key, num_neurons, wanted)
    return int((hashed(key, torch.arange(num_neurons)) <= limit).sum())


# Noise ------------------------------------------------------------------------------------------------


def test_noise_has_the_deviation_that_is_asked_for_and_hits_every_element() -> None:
    source = torch.zeros(300, 1000)
    noise = made(source, noise_scale=0.02)
    assert float(noise.double().std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * 300_000))
    assert abs(float(noise.double().mean())) < 5 * 0.02 / math.sqrt(300_000)


def test_noise_is_another_for_each_tensor_and_seed() -> None:
    source, given_ = torch.zeros(200, 50), settings_of((200, 50), noise_scale=1.0)
    names = [(0, "experts.0"), (0, "experts.1"), (1, "experts.0")]
    drawn = [
        merge(method(), replace(given_, keys=(random_key(seed, name, 0),)), None, [source]).flatten()
        for seed, name in names
    ]
    matrix = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert float(matrix.abs().max()) < 5 / math.sqrt(10_000)


def test_noise_on_redrawn_neurons_is_not_what_they_were_drawn_from() -> None:
    """The variance of a sum of independent numbers; of one number twice it would be 4."""
    source = random_inputs(1, (300, 300))[1][0]
    source = (source - source.mean()) / source.std()
    result = made(source, reinit_fraction=1.0, noise_scale=1.0)
    assert float(result.double().var()) == pytest.approx(2.0, rel=0.03)


def test_the_key_of_the_neurons_does_not_move_the_noise() -> None:
    source = source_of()
    assert same_bits(made(source, noise_scale=0.1, neuron_key=1), made(source, noise_scale=0.1, neuron_key=2))


# The declaration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "identity", "access", "passes"),
    [
        ({}, 0, Access.ELEMENT, 0),
        ({"neuron_key": 5, "neuron_axis": 1, "num_neurons": 48}, 0, Access.ELEMENT, 0),
        ({"scale": 0.5}, None, Access.ELEMENT, 0),
        ({"noise_scale": 1e-3}, None, Access.ELEMENT, 0),
        ({"reinit_fraction": 1e-3}, None, Access.TENSOR, 1),
    ],
)
def test_what_the_settings_ask_for(
    values: dict[str, Value], identity: int | None, access: Access, passes: int
) -> None:
    """As the planner asks: before there are keys and shapes."""
    given_ = replace(settings_of((), **values), keys=())
    assert method().identity(given_) == identity
    assert method().access_with(given_) is access
    assert method().kernel.passes(given_) == passes


def test_large_values_do_not_overflow_and_infinite_ones_show() -> None:
    source = torch.full((4, 4), 3e37)
    source[::2] *= -1
    assert bool(made(source, reinit_fraction=1.0).isfinite().all())
    source[1, 1] = torch.inf
    assert not bool(made(source, reinit_fraction=1.0)[1, 1].isfinite())
