"""Inputs that are gathered from rows: what they hold, and within which limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.gather_maker import Stock, bench_of, expression, made, make_stock, plan_of, whole
from kits.memory_meter import AllocationMeter
from kits.method_kit import same_bits, threads
from kits.segment_bench import Bench, counted_buffers, tiles_of
from kits.simulated_gpu import simulated_gpu, without_gpu

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.merge_plan import segments
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.expressions import Gather, GatherInput, Op, Output, Part, Product, Read, gathered
from raymerge.merge_plan.jobs import GatheredInput, Jobs
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK, ROW_GROUP

ROWS, COLUMNS, RANK = 150, 1000, 5
METHODS = ("linear", "task_arithmetic", "slerp", "ties", "dare_ties")


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stock_tensors(seed: int) -> dict[str, torch.Tensor]:
    return {
        "a": random_tensor(ROWS, COLUMNS, seed=seed),
        "b": random_tensor(ROWS + 7, COLUMNS, seed=seed + 1, dtype=torch.bfloat16),
        "vector": random_tensor(ROWS, seed=seed + 2),
        "lora.up": random_tensor(ROWS, RANK, seed=seed + 3),
        "lora.down": random_tensor(RANK, COLUMNS, seed=seed + 4),
        "lora.magnitude": random_tensor(ROWS, seed=seed + 5).abs(),
        "flipped.up": random_tensor(COLUMNS, RANK, seed=seed + 6, dtype=torch.bfloat16),
        "flipped.down": random_tensor(RANK, ROWS, seed=seed + 7, dtype=torch.bfloat16),
        "square": random_tensor(COLUMNS, COLUMNS, seed=seed + 8),
    }


def output_of(
    reads: tuple[Read, ...], shape: tuple[int, ...] = (ROWS, COLUMNS), method: str = "linear", **values: float
) -> Output:
    has_base = method not in ("linear", "passthrough", "multislerp")
    numbers = {"weight": 0.5, "density": 0.5, "t": 0.3, **values}
    made_of = expression(method, sources=len(reads) - has_base, has_base=has_base, **numbers)
    size = int(np.prod(shape))
    return Output("out", DType.F32, shape, (Op(size, made_of, (Part("out", shape, None),), reads),), True)


def sound_plan(stock: Stock, *outputs: Output) -> Plan:
    plan = plan_of(stock, outputs)
    assert check_plan(plan) == ()
    return plan


def values_of(data: bytes, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.float32)).view(shape)


def made_alone(
    stock: Stock, read: Read, root: Path, shape: tuple[int, ...] = (ROWS, COLUMNS), *, device: str = "cpu"
) -> torch.Tensor:
    output = output_of((read,), shape, "linear", weight=1.0)
    return values_of(made(stock, sound_plan(stock, output), root, device=device)["out"], shape)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make_stock(tmp_path_factory.mktemp("stock"), stock_tensors(0), stock_tensors(100))


def test_a_whole_matrix_is_what_a_plain_read_gives(stock: Stock, tmp_path: Path) -> None:
    plain, rows = stock.read("a"), gathered(0, whole(stock.term("a"), COLUMNS))
    found = [made_alone(stock, each, tmp_path / str(i)) for i, each in enumerate((plain, rows))]
    assert same_bits(*found)


def test_rows_move_are_left_out_repeated_and_filled_with_zeros(stock: Stock, tmp_path: Path) -> None:
    source = stock_tensors(0)["b"].float()
    runs = ((0, 100, 7, 0), (7, 3, 1, 0), (8, 3, 2, 0), (20, 156, 1, 0), (21, 90, 30, 0), (149, 0, 1, 0))
    gather = Gather(ROWS, COLUMNS, (stock.term("b"),), runs, ROWS)
    expected = torch.zeros(ROWS, COLUMNS)
    for to, start, count, _ in runs:
        expected[to : to + count] = source[start : start + count]
    assert same_bits(made_alone(stock, gathered(0, gather), tmp_path), expected)


def test_rows_of_several_terms_are_their_mean(stock: Stock, tmp_path: Path) -> None:
    gather_inputs = (stock.term("a"), stock.term("b"), stock.term("b", 1))
    runs = ((0, 0, 50, 0), (10, 60, 60, 1), (20, 0, 10, 2), (100, 100, 50, 0))
    a, b, c = stock_tensors(0)["a"], stock_tensors(0)["b"].float(), stock_tensors(100)["b"].float()
    expected = torch.zeros(ROWS, COLUMNS)
    expected[:50] = a[:50]
    expected[10:50] += b[60:100]
    expected[50:70] = b[100:120]
    expected[20:30] += c[:10]
    expected[10:50] /= 2
    expected[20:30] = (a[20:30] + b[70:80] + c[:10]) / 3
    expected[100:] = a[100:150]
    found = made_alone(stock, gathered(0, Gather(ROWS, COLUMNS, gather_inputs, runs, ROWS)), tmp_path)
    assert same_bits(found, expected)


@without_gpu
@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_means_are_rounded_once_on_a_gpu_too(count: int, stock: Stock, tmp_path: Path) -> None:
    source, gather_inputs = stock_tensors(0)["b"].float(), (stock.term("b"),) * count
    runs = ((0, 0, 141, 0), *((0, number, 50, number) for number in range(1, count)))
    total = source[:ROWS].numpy().copy()
    for number in range(1, count):
        total[:50] += source[number : number + 50].numpy()
    total[:50] /= np.float32(count)
    mean = (total[:141].astype(np.float64).sum(0) / 141).astype(np.float32)
    gather = Gather(ROWS, COLUMNS, gather_inputs, runs, 141)
    with simulated_gpu(seed=count):
        found = made_alone(stock, gathered(0, gather), tmp_path, device="cuda")
    assert same_bits(found[:141], torch.from_numpy(total[:141]))
    torch.testing.assert_close(found[141], torch.from_numpy(mean), rtol=1e-6, atol=1e-7)


def test_a_vector_is_assembled_element_by_element(stock: Stock, tmp_path: Path) -> None:
    gather = Gather(ROWS, 1, (stock.term("vector"),), ((0, 10, 140, 0), (140, 0, 10, 0)), ROWS)
    found = made_alone(stock, gathered(0, gather), tmp_path, (ROWS,))
    assert same_bits(found, torch.roll(stock_tensors(0)["vector"], -10))


def test_an_assembly_of_no_rows_gives_an_empty_tensor(tmp_path: Path) -> None:
    small = make_stock(tmp_path / "s", {"a": torch.ones(0, 4)})
    gather = Gather(0, 4, (small.term("a"),), (), 0)
    assert made_alone(small, gathered(0, gather), tmp_path / "out", (0, 4)).shape == (0, 4)


def test_padding_is_the_mean_of_all_rows_before(stock: Stock, tmp_path: Path) -> None:
    runs = ((0, 0, 100, 0), (110, 100, 30, 0))
    gather = Gather(ROWS, COLUMNS, (stock.term("a"),), runs, 141)
    found = made_alone(stock, gathered(0, gather), tmp_path)
    assert not found[140].any()
    mean = found[:141].double().mean(0).float()
    torch.testing.assert_close(found[141], mean, rtol=1e-6, atol=1e-7)
    assert all(same_bits(row, found[141]) for row in found[142:])


def _lora(prefix: str, *, transposed: bool = False) -> torch.Tensor:
    up, down = (stock_tensors(0)[f"{prefix}.{name}"].double() for name in ("up", "down"))
    return (up @ down).T if transposed else up @ down


def test_a_product_is_added_to_its_rows(stock: Stock, tmp_path: Path) -> None:
    gather_input = stock.term("a", product=stock.product("lora", RANK, scale=0.7))
    expected = stock_tensors(0)["a"].double() + 0.7 * _lora("lora")
    found = made_alone(stock, gathered(0, whole(gather_input, COLUMNS)), tmp_path)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_transposed_product_runs_along_the_columns_of_down(stock: Stock, tmp_path: Path) -> None:
    gather_input = stock.term("a", product=stock.product("flipped", RANK, scale=-2.0, transposed=True))
    expected = stock_tensors(0)["a"].double() - 2 * _lora("flipped", transposed=True)
    found = made_alone(stock, gathered(0, whole(gather_input, COLUMNS)), tmp_path)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_matrix_is_multiplied_by_another_one(stock: Stock, tmp_path: Path) -> None:
    """The same bits for rows in any order, of a matrix that lies in a fused one too."""
    mixed = stock.term("a", product=Product(None, stock.read("square"), COLUMNS, 0.5))
    a, square = stock_tensors(0)["a"].double(), stock_tensors(0)["square"].double()
    found = made_alone(stock, gathered(0, whole(mixed, COLUMNS)), tmp_path / "a")
    torch.testing.assert_close(found.double(), a + 0.5 * a @ square, rtol=1e-5, atol=1e-4)
    runs = tuple((to, ROWS - 1 - to, 1, 0) for to in range(ROWS))
    turned = made_alone(stock, gathered(0, Gather(ROWS, COLUMNS, (mixed,), runs, ROWS)), tmp_path / "b")
    assert same_bits(turned, found.flip(0))


def test_a_magnitude_gives_rows_their_length(stock: Stock, tmp_path: Path) -> None:
    gather_input = stock.term("a", product=stock.product("lora", RANK, scale=0.7, magnitude=True))
    moved = stock_tensors(0)["a"].double() + 0.7 * _lora("lora")
    length = stock_tensors(0)["lora.magnitude"].double().unsqueeze(1)
    expected = length * moved / moved.norm(dim=1, keepdim=True)
    found = made_alone(stock, gathered(0, whole(gather_input, COLUMNS)), tmp_path)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_has_no_length_to_change(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 4), "l.up": torch.zeros(3, 1), "l.down": torch.zeros(1, 4)}
    small = make_stock(tmp_path / "s", {**tensors, "l.magnitude": torch.ones(3)})
    gather_input = small.term("a", product=small.product("l", 1, magnitude=True))
    assert not made_alone(small, gathered(0, whole(gather_input, 4)), tmp_path / "out", (3, 4)).any()


@pytest.mark.parametrize("magnitude", [False, True])
def test_rows_with_a_product_are_the_same_wherever_they_go(
    magnitude: bool, stock: Stock, tmp_path: Path
) -> None:
    gather_input = stock.term("a", product=stock.product("lora", RANK, magnitude=magnitude))
    straight = made_alone(stock, gathered(0, whole(gather_input, COLUMNS)), tmp_path / "a")
    order = np.random.default_rng(0).permutation(ROWS)
    runs = tuple((to, int(start), 1, 0) for to, start in enumerate(order))
    mixed = made_alone(stock, gathered(0, Gather(ROWS, COLUMNS, (gather_input,), runs, ROWS)), tmp_path / "b")
    assert same_bits(mixed, straight[torch.from_numpy(order)])


def test_a_term_within_a_fused_tensor_is_assembled_whole(tmp_path: Path) -> None:
    """Two projections that take turns column by column, each with a product of its own."""
    fused = random_tensor(6, 8, seed=1)
    tensors = {"fused": fused, "l.up": random_tensor(4, 2, seed=2), "l.down": random_tensor(2, 6, seed=3)}
    small = make_stock(tmp_path / "s", tensors)
    views = [View(offset, (4, 6), (2, 8)) for offset in (0, 1)]
    reads = tuple(
        gathered(part, whole(small.term("fused", view=view, product=small.product("l", 2)), 6))
        for part, view in enumerate(views)
    )
    parts = tuple(Part(f"p{index}", view.shape, view) for index, view in enumerate(views))
    op = Op(48, expression("linear", sources=1, weight=1.0), parts, reads)
    plan = sound_plan(small, Output("out", DType.F32, (6, 8), (op,), True))
    assert not plan["ops"].column("is_flat")[0].as_py()
    found = values_of(made(small, plan, tmp_path / "out")["out"], (6, 8))
    product = (tensors["l.up"] @ tensors["l.down"]).T
    expected = fused + torch.stack([product, product], dim=2).reshape(6, 8)
    torch.testing.assert_close(found, expected)


# The same for every tile, cut and number of threads


def _everything(stock: Stock) -> tuple[Read, Read]:
    """Two inputs with several gather inputs, products, a magnitude, moved rows and padding."""
    gather_inputs = (
        stock.term("a", product=stock.product("lora", RANK, magnitude=True)),
        stock.term("b", 1),
        stock.term("a", 1, product=stock.product("flipped", RANK, transposed=True)),
    )
    runs = ((0, 77, 73, 0), (3, 0, 100, 1), (73, 5, 70, 0), (90, 10, 37, 2))
    first = Gather(ROWS, COLUMNS, gather_inputs, runs, 145)
    second = Gather(ROWS, COLUMNS, gather_inputs[::-1], ((0, 3, 147, 0), (2, 9, 131, 2)), 147)
    return gathered(0, first), gathered(0, second)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_tiles_and_threads_change_no_byte(
    method: str, stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _everything(stock)
    plain = stock.read("a", 1)
    reads = (first, second) if method == "slerp" else (first, second, plain)
    plan = sound_plan(stock, output_of(reads, method=method))
    found = []
    for number, count in enumerate((1, 2)):
        with threads(count):
            found.append(made(stock, plan, tmp_path / str(number)))
    monkeypatch.setattr("raymerge.merge_plan.memory.TILE_MOST", 1)
    ops = Jobs(plan).ops(0)
    least = ops[0].need.least_bytes
    assert max(tile.count for tile in tiles_of(ops, least)) < ROWS * COLUMNS
    found.append(made(stock, plan, tmp_path / "small", budget=least))
    assert found[0] == found[1] == found[2]
    assert torch.isfinite(values_of(found[0]["out"])).all()


def test_pieces_of_a_cut_tensor_are_what_the_whole_is(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_input = stock.term("a", product=stock.product("lora", RANK))
    runs = ((0, 50, 100, 0), (100, 0, 50, 0))
    read = gathered(0, Gather(ROWS, COLUMNS, (gather_input,), runs, ROWS))
    output = output_of((read, stock.read("a", 1)))
    monkeypatch.setattr(segments, "_SMALLEST", 1 << 30)
    whole_one = sound_plan(stock, output)
    monkeypatch.setattr(segments, "_SMALLEST", 1)
    cut = sound_plan(stock, output)
    assert len(whole_one["ops"]) == 1
    firsts = cut["ops"].column("first_element").to_pylist()
    assert len(firsts) > 1
    assert all(first % (ROW_GROUP * COLUMNS) == 0 for first in firsts)
    assert len(cut["gathers"]) == 1
    assert made(stock, whole_one, tmp_path / "a") == made(stock, cut, tmp_path / "b")


def test_a_padded_tensor_is_not_cut(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_SMALLEST", 1)
    assert len(sound_plan(stock, output_of(_everything(stock)))["ops"]) == 1


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, int]]]:
    """A gather's rows and runs: for each input a few, apart from each other."""
    num_rows = draw(st.integers(1, 40))
    runs = []
    for term in range(draw(st.integers(1, 3))):
        to = 0
        while (to := to + draw(st.integers(0, 9))) < num_rows:
            count = draw(st.integers(1, num_rows - to))
            runs.append((to, draw(st.integers(0, 50)), count, term))
            to += count
    return num_rows, sorted(runs, key=lambda run: (run[0], run[3]))


def _input(runs: list[tuple[int, int, int, int]], num_rows: int) -> GatheredInput:
    read = Read(0, 0, "f", 0, 0, DType.F32, None)
    table = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    need = Jobs.__new__(Jobs)  # Not looked at by windows.
    return GatheredInput(num_rows, 1, num_rows, (GatherInput(read, 100),) * 3, table, need)  # type: ignore[arg-type]


@given(case=_cases(), data=st.data())
@settings(deadline=None, max_examples=50)
def test_a_window_takes_just_the_rows_that_lie_in_it(
    case: tuple[int, list[tuple[int, int, int, int]]], data: st.DataObject
) -> None:
    num_rows, runs = case
    source = _input(runs, num_rows)
    first = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(first, num_rows))
    expected: list[dict[int, int]] = [{}, {}, {}]
    for to, start, count, term in runs:
        for step in range(count):
            if first <= to + step < stop:
                expected[term][to + step - first] = start + step
    taken = source.taken(first, stop)
    for each, wanted in zip(taken, expected, strict=True):
        stored = [row for a, b in each.ranges.tolist() for row in range(a, b)]
        assert stored == sorted(set(wanted.values()))
        assert each.num_rows == len(stored)
        assert [each.stored_row(place) for place in range(len(stored))] == stored
        found = {to + i: stored[place + i] for to, place, n in each.moves.tolist() for i in range(n)}
        assert found == wanted
    counts = [sum(row in wanted for wanted in expected) for row in range(stop - first)]
    covers = list(source.covers(taken, stop - first))
    assert [n for a, b, n in covers for _ in range(a, b)] == counts
    assert all(left[2] != right[2] for left, right in pairwise(covers))


def _scattered(stock: Stock, gap: int) -> Plan:
    runs = tuple((to, to * (gap + 1), 1, 0) for to in range(ROWS // (gap + 1)))
    rows = len(runs)
    read = gathered(0, Gather(rows, COLUMNS, (stock.term("a"),), runs, rows))
    return sound_plan(stock, output_of((read,), (rows, COLUMNS)))


def test_neighbouring_rows_are_read_together(stock: Stock, tmp_path: Path) -> None:
    calls: list[int] = []

    class Counting:
        def __init__(self, store: object) -> None:
            self.store = store

        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            calls.append(len(buffer))
            self.store.read_into(key, offset, buffer)  # type: ignore[attr-defined]

    plan = _scattered(stock, 1)
    bench = bench_of(stock, plan, tmp_path)
    bench.runner._sources = [Counting(each) for each in bench.runner._sources]  # type: ignore[misc]
    (receipt,) = (bench.runner.run(number) for number in bench.segments)
    row = 4 * COLUMNS
    assert len(calls) == 1
    assert receipt.read_bytes == calls[0] == (2 * (ROWS // 2) - 1) * row
    found = values_of(dict(bench.written())["out"], (ROWS // 2, COLUMNS))
    assert same_bits(found, stock_tensors(0)["a"][::2] * 0.5 / 0.5)


def test_factors_are_read_once_for_all_passes(stock: Stock, tmp_path: Path) -> None:
    gather_input = stock.term("a", product=stock.product("lora", RANK))
    reads = (stock.read("a", 1), gathered(0, whole(gather_input, COLUMNS)))
    plan = sound_plan(stock, output_of(reads, method="slerp"))
    bench = bench_of(stock, plan, tmp_path)
    (receipt,) = (bench.runner.run(number) for number in bench.segments)
    matrix, factors = 4 * ROWS * COLUMNS, 4 * RANK * (ROWS + COLUMNS)
    assert receipt.read_bytes == 2 * matrix + factors
    (cost,) = plan["segments"].column("cost").to_pylist()
    assert cost == 2 * matrix + factors // ROWS * ROWS + matrix


@pytest.mark.parametrize(
    ("name", "place"),
    [("a", (140, 7)), ("lora.up", (3, 2)), ("lora.down", (1, 999)), ("lora.magnitude", (149,))],
)
def test_a_bad_value_is_named_with_source_and_byte(name: str, place: tuple[int, ...], tmp_path: Path) -> None:
    tensors = stock_tensors(0)
    tensors[name][place] = float("nan")
    bad = make_stock(tmp_path / "bad", tensors)
    gather_input = bad.term("a", product=bad.product("lora", RANK, magnitude=True))
    runs = ((0, 140, 10, 0), (10, 0, 20, 0))
    read = gathered(0, Gather(30, COLUMNS, (gather_input,), runs, 30))
    plan = sound_plan(bad, output_of((read,), (30, COLUMNS)))
    with pytest.raises(NonFiniteError) as caught:
        made(bad, plan, tmp_path / "out")
    (problem,) = caught.value.problems
    stored = bad.sources[0].tensors[name]
    index = int(np.ravel_multi_index(place, stored.shape))
    assert problem.where == f"{tmp_path / 'bad' / '0'}: out"
    assert f"byte {stored.offset + 4 * index} of model.safetensors" in problem.what


def test_a_bad_value_in_a_fused_tensor_is_named_by_its_byte(tmp_path: Path) -> None:
    fused = torch.ones(6, 8)
    fused[5, 6] = float("inf")
    bad = make_stock(tmp_path / "bad", {"fused": fused})
    view = View(0, (4, 6), (2, 8))
    reads = (gathered(0, whole(bad.term("fused", view=view), 6)),)
    op = Op(24, expression("linear", sources=1, weight=1.0), (Part("p", (4, 6), None),), reads)
    plan = sound_plan(bad, Output("out", DType.F32, (4, 6), (op,), True))
    with pytest.raises(NonFiniteError, match=str(bad.sources[0].tensors["fused"].offset + 4 * 46)):
        made(bad, plan, tmp_path / "out")


def test_sums_that_overflow_blame_no_source(tmp_path: Path) -> None:
    huge = make_stock(tmp_path / "s", {"a": torch.full((2, 2), 3e38)})
    gather_input = huge.term("a")
    both = Gather(2, 2, (gather_input, gather_input), ((0, 0, 2, 0), (0, 0, 2, 1)), 2)
    with pytest.raises(NonFiniteError, match="the sources are finite"):
        made(huge, sound_plan(huge, output_of((gathered(0, both),), (2, 2))), tmp_path / "out")


def _peak(bench: Bench) -> int:
    """Bytes in use at most: tensors, and the buffers of what is read and written."""
    with counted_buffers() as buffers, AllocationMeter() as meter:
        for number in bench.segments:
            bench.runner.run(number)
    return meter.peak_bytes + buffers.most


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_measured_memory_stays_within_the_projection(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 1)
    rows, columns, rank = 300, 1024, 8
    tensors = {
        "a": random_tensor(rows, columns, seed=1, dtype=torch.bfloat16),
        "b": random_tensor(rows, columns, seed=2),
        "lora.up": random_tensor(rows, rank, seed=3),
        "lora.down": random_tensor(rank, columns, seed=4),
        "lora.magnitude": random_tensor(rows, seed=5).abs(),
    }
    large = make_stock(tmp_path / "s", tensors)
    product = large.product("lora", rank, magnitude=True)
    gather_inputs = (large.term("a", product=product), large.term("b"))
    order = np.random.default_rng(0).permutation(rows // 5).tolist()
    moved = [(5 * to, 5 * start, 5, 0) for to, start in enumerate(order)]
    runs = sorted([*moved, (5, 3, 200, 1)], key=_by_row)
    first = gathered(0, Gather(rows + 10, columns, gather_inputs, tuple(runs), rows))
    second = gathered(0, Gather(rows + 10, columns, gather_inputs[::-1], ((0, 0, rows, 0),), rows))
    reads = (first, second) if method == "slerp" else (first, second, first)
    plan = sound_plan(large, output_of(reads, (rows + 10, columns), method))
    budget = Jobs(plan).ops(0)[0].need.least_bytes
    bench = bench_of(large, plan, tmp_path / "out", budget=budget)
    assert len({tile.start for tile in tiles_of(bench.runner._jobs[0].ops(0), budget)}) > 2
    assert 0 < _peak(bench) <= bench.projection.peak <= budget


@pytest.mark.parametrize(("method", "resident"), [("slerp", True), ("ties", True), ("slerp", False)])
def test_memory_of_long_rows_that_tiles_cut_stays_within_the_projection(
    method: str, resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tile holds the rows at its ends whole; kept over several passes these add up."""
    monkeypatch.setattr("raymerge.merge_plan.memory.TILE_MOST", BLOCK)
    rows, columns = 12, 50_000
    large = make_stock(tmp_path / "s", {"a": random_tensor(rows, columns, seed=1)})
    read = gathered(0, whole(large.term("a"), columns))
    plan = sound_plan(large, output_of((read, read), (rows, columns), method))
    budget = (128 if resident else 24) << 20
    bench = bench_of(large, plan, tmp_path / "out", budget=budget)
    starts = {tile.start for tile in tiles_of(bench.runner._jobs[0].ops(0), budget)}
    assert (len(starts) == 1) is resident
    assert 0 < _peak(bench) <= bench.projection.peak <= budget


def _by_row(run: tuple[int, int, int, int]) -> tuple[int, int]:
    return run[0], run[3]


def test_memory_of_small_rows_stays_within_the_projection(stock: Stock, tmp_path: Path) -> None:
    vector = Gather(ROWS, 1, (stock.term("vector"),) * 2, ((0, 0, ROWS, 0), (3, 9, 50, 1)), ROWS - 1)
    vector = replace(vector, runs=((0, 0, ROWS - 1, 0), (3, 9, 50, 1)))
    plan = sound_plan(stock, output_of((gathered(0, vector),) * 3, (ROWS,), "ties"))
    bench = bench_of(stock, plan, tmp_path)
    assert BLOCK < _peak(bench) <= bench.projection.peak
