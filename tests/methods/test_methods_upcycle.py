"""upcycle: the kit, the definition in numpy, and what makes experts of dense matrices."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import Case, MethodKit, make_settings, merge, random_inputs, same_bits
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Access, Method, Settings, Tile, Value, find_method, normal, random_key
from raymerge.methods.random import hashed
from raymerge.methods.reduce import PIECE
from raymerge.methods.upcycle import _limit

Array = NDArray[np.float64]
CPU = torch.device("cpu")
SHAPE = (48, 30)


def method() -> Method:
    found = find_method("upcycle")
    assert found is not None
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


def chosen_by_sorting(key: int, num_neurons: int, fraction: float) -> list[int]:
    """The neurons of smallest hash."""
    order = hashed(random_key(key, "neurons", 0), torch.arange(num_neurons)).argsort()
    return sorted(order[: round(fraction * num_neurons)].tolist())


def defined(source: torch.Tensor, settings_: Settings) -> Array:
    """Redraw, noise, scale, in float64."""
    (values,) = settings_.sources
    (key,) = settings_.keys
    result = source.double().numpy().copy()
    axis, fraction = int(values["neuron_axis"] or 0), float(values["reinit_fraction"] or 0)
    own = source.shape[axis]
    first, num_neurons = int(values["neuron_first"] or 0), int(values["num_neurons"] or 0) or own
    numbers = (key, random_key(key, "redrawn", 0))
    noise, drawn = (normal(each, 0, source.numel(), CPU).view(source.shape).double() for each in numbers)
    chosen = chosen_by_sorting(int(values["neuron_key"] or 0), num_neurons, fraction) if fraction else []
    lines = [neuron - first for neuron in chosen if first <= neuron < first + own]
    if lines:
        place = (lines, slice(None)) if axis == 0 else (slice(None), lines)
        replaced = result[place]
        result[place] = replaced.mean() + replaced.std() * drawn.numpy()[place]
    result += float(values["noise_scale"] or 0) * noise.numpy()
    return result * float(values["scale"] or 0)


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    fraction=st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]),
    axis=st.integers(0, 1),
    key=st.integers(0, 2**53),
    slice_=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)),
    noise=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([1.0, -2.0, 0.125]),
)
def test_it_follows_its_definition(
    shape: tuple[int, int],
    fraction: float,
    axis: int,
    key: int,
    slice_: tuple[int, int] | None,
    noise: float,
    scale: float,
) -> None:
    first, after = slice_ or (0, 0)
    given_ = settings_of(
        shape,
        reinit_fraction=fraction,
        neuron_axis=axis,
        neuron_key=key,
        neuron_first=first,
        num_neurons=first + shape[axis] + after if slice_ else 0,
        noise_scale=noise,
        scale=scale,
    )
    source = source_of(shape) + 3.0
    found = merge(method(), given_, None, [source]).double().numpy()
    np.testing.assert_allclose(found, defined(source, given_), rtol=2e-6, atol=2e-6)


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


@settings(deadline=None, max_examples=60)
@given(num_neurons=st.integers(1, 5000), share=st.floats(0, 1), key=st.integers(0, 2**64 - 1))
def test_the_limit_lets_exactly_so_many_through(num_neurons: int, share: float, key: int) -> None:
    wanted = max(1, round(share * num_neurons))
    assert passed(key, num_neurons, wanted) == wanted


@pytest.mark.parametrize("wanted", [1, 2, 30_000, 99_999, 100_000])
def test_more_neurons_than_are_held_at_once(wanted: int) -> None:
    assert 2 * PIECE < 100_000
    assert passed(77, 100_000, wanted) == wanted


def passed(key: int, num_neurons: int, wanted: int) -> int:
    """How many of the hashes reach up to the limit."""
    limit = _limit(key, num_neurons, wanted)
    return int((hashed(key, torch.arange(num_neurons)) <= limit).sum())


def test_every_neuron_is_chosen_equally_often() -> None:
    counts = torch.zeros(64)
    for key in range(800):
        counts[chosen_by_sorting(key, 64, 0.25)] += 1
    # Choosing 16 of 64 without putting back leaves 63 degrees of freedom.
    chi_square = float(((counts - 200) ** 2 / (800 * 0.25 * 0.75)).sum()) * 63 / 64
    assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)


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


def test_tiles_within_a_row_and_within_a_run_of_columns() -> None:
    """A wide tensor: no tile starts at a row."""
    source = source_of((5, BLOCK + 333))
    for axis in (0, 1):
        given_ = settings_of(tuple(source.shape), reinit_fraction=0.4, neuron_axis=axis)
        tiled = merge(method(), given_, None, [source], (BLOCK, 2 * BLOCK, 4 * BLOCK))
        assert same_bits(tiled, merge(method(), given_, None, [source]))


def test_large_values_do_not_overflow_and_infinite_ones_show() -> None:
    source = torch.full((4, 4), 3e37)
    source[::2] *= -1
    assert bool(made(source, reinit_fraction=1.0).isfinite().all())
    source[1, 1] = torch.inf
    assert not bool(made(source, reinit_fraction=1.0)[1, 1].isfinite())


def test_an_empty_tensor_is_its_own_expert() -> None:
    given_ = settings_of((0, 5), reinit_fraction=0.5, neuron_axis=1)
    state = method().kernel.begin(given_, 0, CPU)
    method().kernel.conclude(state, given_, 0)
    assert method().kernel.apply(Tile(None, torch.empty(1, 0), 0), given_, state).shape == (0,)


# Fine-grained experts, as docs/methods.md has them ----------------------------------------------------


def block(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A gated feed-forward block; x is ``[tokens, hidden]``."""
    return torch.nn.functional.linear(torch.nn.functional.silu(x @ gate.T) * (x @ up.T), down)


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    experts: list[list[torch.Tensor]],
    chosen: int,
    *,
    renormalise: bool,
) -> torch.Tensor:
    """Each token's chosen experts by weight: the softmax over all experts, renormalised or not."""
    weights, picked = torch.softmax(x @ router.T, dim=1).topk(chosen, dim=1)
    if renormalise:
        weights = weights / weights.sum(dim=1, keepdim=True)
    outputs = torch.stack([block(x, *expert) for expert in experts], dim=1)
    taken = outputs.gather(1, picked.unsqueeze(2).expand(-1, -1, x.shape[1]))
    return (weights.unsqueeze(2) * taken).sum(dim=1)


def shards(matrices: list[torch.Tensor], granularity: int, factor: float) -> list[list[torch.Tensor]]:
    """A block cut into narrow ones; down's columns are scaled."""
    gate, up, down = matrices
    cuts = (gate.chunk(granularity), up.chunk(granularity), down.chunk(granularity, dim=1))
    return [[g, u, made(d.contiguous(), scale=factor)] for g, u, d in zip(*cuts, strict=True)]


@pytest.mark.parametrize("granularity", [1, 2, 4])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_shards_chosen_together_are_the_whole(granularity: int, per_token: int) -> None:
    """Different experts, any router: the same mixture as before the cut."""
    num_experts = 4
    generator = torch.Generator().manual_seed(1)
    experts = [
        [torch.randn(shape, generator=generator) for shape in ((16, 8), (16, 8), (8, 16))]
        for _ in range(num_experts)
    ]
    x, router = torch.randn((32, 8), generator=generator), torch.randn((num_experts, 8), generator=generator)
    whole = mixture(x, router, experts, per_token, renormalise=True)
    cut = [shard for expert in experts for shard in shards(expert, granularity, granularity)]
    rows = router.repeat_interleave(granularity, dim=0)
    found = mixture(x, rows, cut, per_token * granularity, renormalise=True)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("granularity", [1, 2, 4])
@pytest.mark.parametrize("per_token", [1, 2, 3])
@pytest.mark.parametrize("renormalise", [True, False])
def test_equal_experts_compute_what_the_dense_model_does(
    granularity: int, per_token: int, renormalise: bool
) -> None:
    num_experts = 4
    generator = torch.Generator().manual_seed(2)
    dense = [torch.randn(shape, generator=generator) for shape in ((16, 8), (16, 8), (8, 16))]
    x, router = torch.randn((32, 8), generator=generator), torch.randn((num_experts, 8), generator=generator)
    # A router without preferences, but for what tells the experts apart.
    router *= 1.0 if renormalise else 1e-4
    factor = granularity if renormalise else num_experts * granularity / per_token
    experts = [shard for _ in range(num_experts) for shard in shards(dense, granularity, factor)]
    rows = router.repeat_interleave(granularity, dim=0)
    found = mixture(x, rows, experts, per_token * granularity, renormalise=renormalise)
    torch.testing.assert_close(found, block(x, *dense), rtol=2e-3, atol=5e-3)
