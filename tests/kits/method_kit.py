"""Tests that every merge method inherits. They try to falsify what it declares about itself.

A new method's test is a subclass that names the method and gives a few cases::

    class TestTies(MethodKit):
        name = "ties"
        cases = (Case({"normalize": True}, ({"weight": 0.5, "density": 0.3},) * 3),)

``merge`` is a small executor, for any test that wants a method's result without running a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.simulated_gpu import simulated_gpu, without_gpu
from torch.overrides import TorchFunctionMode

from raymerge.methods import (
    BLOCK,
    Access,
    BaseUse,
    Expected,
    LogicalTensor,
    Method,
    Parameter,
    Settings,
    Stored,
    StoredKernel,
    Takes,
    Tile,
    Value,
    find_method,
    gather,
    random_key,
    sample_of,
)
from raymerge.methods.reference import Floats

CPU = torch.device("cpu")
LARGE = (3, BLOCK + 77)
"""A shape of several blocks, rows that no block divides, and a last block that is not full."""
LARGE_ROWS = (77, 1501)
"""A shape of several groups of rows, of more elements than a block, and a last group that is not full; of
enough elements for torch to set several threads to work."""
FEW_BYTES = 65536
"""What may be allocated beside tiles: scalars, runs that a loop works on, and the like."""

inherited = hypothesis_settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.differing_executors]
)


@dataclass(frozen=True)
class Case:
    values: Mapping[str, Value] = field(default_factory=dict)
    """Global parameters."""
    sources: tuple[Mapping[str, Value], ...] = ({},)
    """Per-source parameters, which also say how many sources there are."""
    fixes_equal_inputs: bool = True
    """Whether inputs that are all the same give that same tensor, to the last bit."""


def default_case(method: Method) -> Case:
    needed = {
        scope: {p.name: _some_value(p) for p in method.parameters if p.required and p.scope == scope}
        for scope in ("global", "source")
    }
    count = min(max(method.min_sources, 3), method.max_sources or 3)
    return Case(needed["global"], (needed["source"],) * count, fixes_equal_inputs=False)


def _some_value(parameter: Parameter) -> Value:
    low, high = parameter.minimum, parameter.maximum
    return parameter.coerce(0.5 if low is None and high is None else low if low is not None else high or 0.0)


def method_named(name: str) -> Method:
    method = find_method(name)
    assert method is not None
    return method


def sources_of(*weights: float, **others: Value) -> tuple[dict[str, Value], ...]:
    return tuple({"weight": weight, **others} for weight in weights)


def settings_for(name: str, case: Case, shape: tuple[int, ...] = ()) -> Settings:
    return make_settings(method_named(name), case, shape)


def run(name: str, case: Case, base: torch.Tensor | None, sources: list[torch.Tensor]) -> torch.Tensor:
    return merge(method_named(name), settings_for(name, case, tuple(sources[0].shape)), base, sources)


def make_settings(method: Method, case: Case, shape: tuple[int, ...] = ()) -> Settings:
    values = {p.name: p.default for p in method.parameters if p.scope == "global"}
    source = {p.name: p.default for p in method.parameters if p.scope == "source"}
    keys = tuple(random_key(7, "tensor", index) for index in range(len(case.sources)))
    return Settings(
        values={**values, **case.values},
        sources=tuple({**source, **given_} for given_ in case.sources),
        keys=keys if method.random else (),
        shape=shape,
    )


def merge(
    method: Method,
    settings: Settings,
    base: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    cuts: Sequence[int] = (),
) -> torch.Tensor:
    """What the executor does with one logical tensor: passes over its tiles, cut at ``cuts``."""
    shape = sources[0].shape
    tiles = list(_tiles(method, base, sources, sorted({0, *cuts, shape.numel()})))
    state = gather(
        method,
        settings,
        shape.numel(),
        sources[0].device,
        tiles=lambda: tiles,
        sample=lambda: sample_of(next(_tiles(method, base, sources, (0, shape.numel())))),
    )
    results = [method.kernel_with(settings).apply(tile, settings, state) for tile in tiles]
    return torch.cat(results).view(shape) if results else sources[0].new_empty(shape)


def _tiles(
    method: Method, base: torch.Tensor | None, sources: Sequence[torch.Tensor], bounds: Sequence[int]
) -> Iterator[Tile]:
    flat_base = None if base is None or method.base is BaseUse.UNUSED else base.flatten()
    flat = [source.flatten() for source in sources]
    for begin, end in itertools.pairwise(bounds):
        inputs = [source[begin:end] for source in flat]
        tile_base = None if flat_base is None else flat_base[begin:end]
        if method.takes is Takes.DELTAS:
            assert tile_base is not None
            inputs = [source - tile_base for source in inputs]
        yield Tile(tile_base, torch.stack(inputs), begin)


@dataclass(frozen=True)
class _Exactly:
    values: Floats
    held: int = 0

    def read(self, start: int, stop: int) -> tuple[Floats, None]:
        return self.values[start:stop], None


class _NoTorch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a reference computes with torch: {func}")


def expected_of(
    method: Method, settings: Settings, base: torch.Tensor | None, sources: Sequence[torch.Tensor]
) -> Expected:
    has_base = base is not None and method.base is not BaseUse.UNUSED
    inputs = [base, *sources] if base is not None and has_base else sources
    numbers = [_Exactly(each.flatten().double().numpy()) for each in inputs]
    deltas = method.takes is Takes.DELTAS
    settings = replace(settings, shape=tuple(sources[0].shape))
    with _NoTorch():
        tensor = LogicalTensor(numbers, settings, has_base=has_base, takes_deltas=deltas, budget=1 << 28)
        return method.reference.prepare(tensor)(tensor.block(0, tensor.num_elements))


def assert_as_expected(result: torch.Tensor, expected: Expected) -> None:
    numbers = result.flatten().double().numpy()
    allowed = 2 * expected.doubt + 2.0**-23 * np.abs(expected.values)
    agrees = np.abs(numbers - expected.values) <= allowed
    for places, values in expected.others:
        agrees[places] |= np.abs(numbers[places] - values) <= allowed[places]
    wrong = np.flatnonzero(~agrees)
    assert not len(wrong), (wrong[:5], numbers[wrong[:5]], expected.values[wrong[:5]])
    open_places = {int(place) for places, _ in expected.others for place in places}
    assert len(open_places) <= 1 + len(numbers) / 50


def random_inputs(
    num_sources: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(20)
    base = torch.randn(shape, generator=generator)
    sources = [base + 0.05 * torch.randn(shape, generator=generator) for _ in range(num_sources)]
    return base.to(dtype).float(), [source.to(dtype).float() for source in sources]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MethodKit:
    name: ClassVar[str]
    cases: ClassVar[tuple[Case, ...]]
    may_alias: ClassVar[bool] = False
    """Whether the result may be the source's own memory."""
    scales: ClassVar[bool] = True
    is_symmetric: ClassVar[bool] = True
    """Whether the order of the sources, with their settings, does not matter (but for rounding)."""

    def method(self) -> Method:
        return method_named(self.name)

    def inputs(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return random_inputs(count, shape, dtype)

    def runs(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Case, Settings, torch.Tensor, list[torch.Tensor]]]:
        for case in self.cases:
            yield (
                case,
                make_settings(self.method(), case, shape),
                *self.inputs(len(case.sources), shape, dtype),
            )

    def test_declaration_holds_together(self) -> None:
        method = self.method()
        names = [parameter.name for parameter in method.parameters]
        assert len(names) == len(set(names))
        assert method.summary.endswith(".")
        assert method.takes is Takes.WEIGHTS or method.base is BaseUse.REQUIRED
        assert all(p.default is None for p in method.parameters if p.required)
        assert all(p.coerce(p.default) == p.default for p in method.parameters if p.default is not None)

    def test_cases_are_allowed(self) -> None:
        method = self.method()
        for case, settings, _, _ in self.runs((3, 4)):
            assert method.check(settings) is None
            assert len(case.sources) >= method.min_sources
            assert method.max_sources is None or len(case.sources) <= method.max_sources
            for parameter in method.parameters:
                given_ = [case.values] if parameter.scope == "global" else case.sources
                assert not parameter.required or all(parameter.name in values for values in given_)

    @inherited
    @given(data=st.data())
    def test_any_tiling_gives_the_same_bits(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4))
        for settings, base, sources in self.large_runs():
            step = self.method().granule(settings)
            last = (base.numel() - 1) // step
            # Without a place to cut at there is nothing to compare: that is "twice the same".
            if last:
                cuts = [step * (1 + n % last) for n in numbers]
                whole = merge(self.method(), settings, base, sources)
                assert same_bits(merge(self.method(), settings, base, sources, cuts), whole)

    def test_kernel_and_reference_agree(self) -> None:
        shapes: tuple[tuple[int, ...], ...] = ((37, 101), (77,), (3, 5, 16))
        for _, settings, base, sources in (run for shape in shapes for run in self.runs(shape)):
            result = merge(self.method(), settings, base, sources)
            assert_as_expected(result, expected_of(self.method(), settings, base, sources))

    def test_smallest_tiles_give_the_same_bits(self) -> None:
        small = ((settings, base, sources) for _, settings, base, sources in self.runs((70, 5)))
        for settings, base, sources in itertools.chain(small, self.large_runs()):
            step = self.method().granule(settings)
            if not 1 < base.numel() / step <= 2000:
                continue
            tiled = merge(self.method(), settings, base, sources, range(0, base.numel(), step))
            assert same_bits(tiled, merge(self.method(), settings, base, sources))

    def large_runs(self) -> Iterator[tuple[Settings, torch.Tensor, list[torch.Tensor]]]:
        """Every case in a shape that is cut into several tiles, unless it needs the whole matrix.

        Only what is cut at blocks has to have several of them.
        """
        for case in self.cases:
            settings = make_settings(self.method(), case, LARGE)
            if self.method().access_with(settings) is not Access.TENSOR:
                settings = replace(settings, shape=LARGE_ROWS)
            yield settings, *self.inputs(len(case.sources), settings.shape)

    def test_threads_do_not_change_a_bit(self) -> None:
        for settings, base, sources in self.large_runs():
            if self.method().access_with(settings) is Access.MATRIX:
                # Decompositions are the libraries' own; the executor gives them one thread.
                continue
            with threads(1):
                alone = merge(self.method(), settings, base, sources)
            # The second tile is long enough for several threads, so one merge shows both.
            cuts = (self.method().granule(settings),)
            with threads(2):
                assert same_bits(merge(self.method(), settings, base, sources, cuts), alone)

    def test_twice_the_same(self) -> None:
        for _, settings, base, sources in self.runs((31, 9)):
            first = merge(self.method(), settings, base, sources)
            assert same_bits(merge(self.method(), settings, base, sources), first)

    def test_tiles_are_not_written_to(self) -> None:
        method = self.method()
        for _, settings, base, sources in self.runs((31, 9)):
            (tile,) = _tiles(method, base, sources, (0, base.numel()))
            inputs = [*tile.sources] if tile.base is None else [tile.base, *tile.sources]
            before = [tensor.clone() for tensor in inputs]
            result = _run(method, tile, settings)
            if not self.may_alias:
                result.fill_(1.0)
            assert all(same_bits(*pair) for pair in zip(inputs, before, strict=True))

    def test_result_is_a_float32_run_of_the_same_length(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for _, settings, base, sources in self.runs((17, 33), dtype):
                (tile,) = _tiles(self.method(), base, sources, (0, base.numel()))
                result = _run(self.method(), tile, settings)
                assert result.dtype is torch.float32
                assert result.shape == (17 * 33,)
                assert bool(result.isfinite().all())

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (2, 3, 4)])
    def test_unusual_shapes(self, shape: tuple[int, ...]) -> None:
        for _, settings, base, sources in self.runs(shape):
            result = merge(self.method(), settings, base, sources)
            assert result.shape == shape
            assert bool(result.isfinite().all())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_not_finite_reaches_the_result(self, bad: float) -> None:
        for _, settings, base, sources in self.runs((40, 5)):
            for index, position in itertools.product(range(len(sources)), (0, 63, 199)):
                broken = [source.clone() for source in sources]
                broken[index].view(-1)[position] = bad
                result = merge(self.method(), settings, base, broken).view(-1)
                assert not bool(result[position].isfinite())

    def test_equal_inputs_are_left_alone(self) -> None:
        for case, settings, base, sources in self.runs((31, 9)):
            if not case.fixes_equal_inputs:
                continue
            base[:3, :3] = -0.0
            result = merge(self.method(), settings, base, [base] * len(sources))
            assert same_bits(result, base)

    def test_deltas_are_all_it_knows_of_the_sources(self) -> None:
        """The merged delta must not depend on the base that it is added to."""
        method = self.method()
        if method.takes is not Takes.DELTAS:
            return
        for _, settings, base, sources in self.runs((31, 9)):
            deltas = torch.stack([(source - base).flatten() for source in sources])
            merged = _run(method, Tile(torch.zeros(base.numel()), deltas, 0), settings)
            shifted = _run(method, Tile(base.flatten(), deltas, 0), settings)
            assert torch.equal(shifted, merged + base.flatten())

    def test_order_of_sources(self) -> None:
        if not self.is_symmetric:
            return
        for _, settings, base, sources in self.runs((31, 9)):
            turned = replace(settings, sources=settings.sources[::-1], keys=settings.keys[::-1])
            result = merge(self.method(), turned, base, sources[::-1])
            torch.testing.assert_close(result, merge(self.method(), settings, base, sources))

    @pytest.mark.parametrize("exponent", [-60, -20, 40])
    def test_no_threshold_is_absolute(self, exponent: int) -> None:
        if not self.scales:
            return
        scale = 2.0**exponent
        for _, settings, base, sources in self.runs((31, 9)):
            plain = merge(self.method(), settings, base, sources)
            scaled = merge(self.method(), settings, base * scale, [source * scale for source in sources])
            assert same_bits(scaled, plain * scale)

    def test_identity_tells_the_truth(self) -> None:
        for _, settings, base, sources in self.runs((31, 9)):
            index = self.method().identity(settings)
            if index is not None:
                assert same_bits(merge(self.method(), settings, base, sources), sources[index])

    @pytest.mark.parametrize("shape", [(300,), (3, BLOCK)])
    def test_memory_stays_within_the_declaration(self, shape: tuple[int, ...]) -> None:
        method = self.method()
        for _, settings, base, sources in self.runs(shape):
            (tile,) = _tiles(method, base, sources, (0, base.numel()))
            scratch, kept, _ = _declared(method, settings, base.numel())
            # Once unmeasured: what is compiled or imported is no part of it.
            method.kernel_with(settings).apply(tile, settings, _state_of(method, tile, settings))
            with AllocationMeter() as gathered:
                state = _state_of(method, tile, settings)
            assert gathered.peak_bytes <= scratch + kept + FEW_BYTES
            with AllocationMeter() as applied:
                result = method.kernel_with(settings).apply(tile, settings, state)
            assert applied.peak_bytes <= scratch + result.nbytes + FEW_BYTES

    @pytest.mark.parametrize("shape", [(300,), (3, BLOCK)])
    def test_stored_memory_stays_within_the_declaration(self, shape: tuple[int, ...]) -> None:
        """Beside the temporaries there is room for inputs and result in float32, as they are not widened."""
        method = self.method()
        most = max(len(case.sources) for case in self.cases)
        for case, settings, base, sources in self.runs(shape, torch.bfloat16):
            kernel = method.kernel_with(settings)
            if not isinstance(kernel, StoredKernel):
                return
            if len(case.sources) < most:
                # Loops are compiled for each number of sources, which takes seconds.
                continue
            stored, out = _stored(method, base, sources), np.empty(base.numel(), np.uint16)
            scratch, kept, columns = _declared(method, settings, base.numel())
            wide = 4 * base.numel() * (len(stored.places) + 1)
            (tile,) = _tiles(method, base, sources, (0, base.numel()))
            # Once unmeasured: what is compiled or imported is no part of it.
            kernel.apply_stored(stored, settings, _state_of(method, tile, settings, stored), out)
            with AllocationMeter() as gathered:
                state = _state_of(method, tile, settings, stored)
            with AllocationMeter() as applied:
                kernel.apply_stored(stored, settings, state, out)
            assert gathered.peak_bytes <= scratch + kept + wide + FEW_BYTES
            assert applied.peak_bytes <= scratch + columns + wide + FEW_BYTES

    @without_gpu
    def test_a_simulated_gpu_gives_the_same_bits(self) -> None:
        for seed, (_, settings, base, sources) in enumerate(self.runs((70, 5))):
            with simulated_gpu(seed) as gpu:
                on_gpu = [each.to("cuda") for each in sources]
                found = merge(self.method(), settings, base.to("cuda"), on_gpu).cpu()
            assert gpu.operations > 0
            assert same_bits(found, merge(self.method(), settings, base, sources))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_gives_the_same_to_rounding(self) -> None:
        for _, settings, base, sources in self.runs(LARGE):
            on_gpu = merge(self.method(), settings, base.cuda(), [source.cuda() for source in sources])
            on_cpu = merge(self.method(), settings, base, sources)
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-6, atol=1e-7)


def kit_of(declared: Method) -> type[MethodKit]:

    class Kit(MethodKit):
        name = declared.name
        cases = (default_case(declared),)
        may_alias = True
        is_symmetric = False

        def method(self) -> Method:
            return declared

    return Kit


def _declared(method: Method, settings: Settings, elements: int) -> tuple[int, int, int]:
    """Bytes beside tiles, bytes of the state, and those of it that belong to columns."""
    count = len(settings.sources)
    columns = count * settings.row_length * method.state_bytes_per_column
    scratch = 4 * max(elements, BLOCK) * (method.scratch + count * method.scratch_per_source)
    return scratch, method.state_bytes * count + columns, columns


def _run(method: Method, tile: Tile, settings: Settings) -> torch.Tensor:
    return method.kernel_with(settings).apply(tile, settings, _state_of(method, tile, settings))


def _state_of(method: Method, tile: Tile, settings: Settings, stored: Stored | None = None) -> object:
    size = tile.sources.shape[1]
    only = tile if stored is None else stored
    return gather(method, settings, size, CPU, tiles=lambda: (only,), sample=lambda: sample_of(tile))


def _stored(method: Method, base: torch.Tensor, sources: Sequence[torch.Tensor]) -> Stored:
    inputs = sources if method.base is BaseUse.UNUSED else [base, *sources]
    words = torch.cat([each.flatten().bfloat16().view(torch.int16) for each in inputs]).numpy()
    return Stored(words.view(np.uint16), np.arange(len(inputs)) * base.numel(), base.numel(), 0)
