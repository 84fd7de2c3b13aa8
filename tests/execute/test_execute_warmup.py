"""Warming up: every method once, on what lanes give it; what fails is told, and a GPU that fails is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.merge_cases import Family, make_family, recipes
from kits.segment_bench import make_bench

from raymerge import device_numerics
from raymerge.checkpoints.quantisation.encoding import Encoding, Format, encoding_of, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.device_numerics import DeviceError
from raymerge.dtypes import DType
from raymerge.execute import segment
from raymerge.execute import segment as segment_module
from raymerge.execute.segment import warm_up
from raymerge.execute.transfers import transfers_for
from raymerge.merge_plan.expressions import Expression, copy_expression, make_expression
from raymerge.methods import Access, BaseUse, Method, Settings, find_method, methods

CPU = torch.device("cpu")
NUMBERS = {"weight": 0.3, "t": 0.5, "density": 0.5, "lambda": 1.0, "gamma": 0.02, "epsilon": 0.1}


def _settings(method: Method, count: int) -> Settings:
    values: dict[str, dict[str, Any]] = {"global": {}, "source": {}}
    for each in method.parameters:
        values[each.scope][each.name] = NUMBERS.get(each.name, each.default)
    return Settings(values["global"], (values["source"],) * count)


def _expression(name: str, count: int = 2) -> Expression:
    method = find_method(name)
    assert method is not None
    settings = _settings(method, min(count, method.max_sources or count))
    return make_expression(method, settings, has_base=method.base is BaseUse.REQUIRED, cast=DType.BF16)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Notes with what was computed: methods, and how many sources they had."""
    found: list[tuple[str, int]] = []
    whole = segment._compute

    def compute(method: Method, settings: Settings, device: torch.device, *, has_base: bool) -> None:
        found.append((method.name, len(settings.sources)))
        whole(method, settings, device, has_base=has_base)

    monkeypatch.setattr(segment, "_compute", compute)
    return found


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_warms_up_or_says_why_not(name: str, computed: list[tuple[str, int]]) -> None:
    method = find_method(name)
    assert method is not None
    expression = _expression(name)
    warm_up([expression], CPU)
    is_left = method.bound_to_shape or method.access_with(_settings(method, 2)) is Access.MATRIX
    assert [found for found, _ in computed] == ([] if is_left else [name])


def test_each_method_is_computed_once_for_each_number_of_sources(computed: list[tuple[str, int]]) -> None:
    again = replace(_expression("linear"), cast=DType.F32)
    warm_up([copy_expression(DType.BF16), _expression("linear"), again, _expression("linear", 3)], CPU)
    assert computed == [("linear", 2), ("linear", 3)]


def test_settings_of_one_shape_are_not_tried_on_another() -> None:
    """A slice of neurons of a wider matrix than the one that is warmed up with."""
    method = find_method("upcycle")
    assert method is not None
    settings = _settings(method, 1)
    source = {**settings.sources[0], "reinit_fraction": 0.5, "neuron_first": 4, "num_neurons": 8}
    settings = replace(settings, sources=(source,))
    warm_up([make_expression(method, settings, has_base=False, cast=DType.BF16)], CPU)


def test_a_gpu_that_cannot_be_begun_with_is_told_apart() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError):
        warm_up([], torch.device("cuda"))


# What a worker makes of it


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), hidden=64)


def _fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    """A machine whose GPU fails like that; the devices that are warmed up."""
    found: list[str] = []

    def warm(_: object, device: torch.device) -> None:
        found.append(device.type)
        if device.type == "cuda":
            raise error

    monkeypatch.setattr(segment_module, "warm_up", warm)
    return found


def test_a_gpu_that_fails_at_once_leaves_every_segment_to_the_processor(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_bench(recipes(family)["linear"], tmp_path / "alone")
    alone = [expected.runner.run(number) for number in expected.segments]
    found = _fails(monkeypatch, DeviceError("CUDA unknown error\nmore of it"))
    bench = make_bench(recipes(family)["linear"], tmp_path / "gpu", device="cuda")
    receipts = [bench.runner.run(number) for number in bench.segments]
    assert found == ["cuda", "cpu"]
    assert {each.note for each in receipts} == {"the GPU failed: CUDA unknown error"}
    assert [each.digests for each in receipts] == [each.digests for each in alone]


def test_a_gpu_whose_memory_is_taken_is_tried_by_the_segments(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _fails(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."))
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    tried: list[str] = []

    def transfers(device: torch.device) -> Any:
        tried.append(device.type)
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.")
        return whole(device)

    whole = transfers_for
    monkeypatch.setattr(segment_module, "transfers_for", transfers)
    monkeypatch.setattr(device_numerics, "check_full_float32", lambda _: None)
    note = bench.runner.run(0).note
    assert note.startswith("the GPU has too little memory: CUDA out of memory.")
    assert (found, tried) == (["cuda", "cpu"], ["cuda", "cpu"])


def test_a_defect_of_a_method_ends_the_worker(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU as on a processor: no note may hide it."""
    found = _fails(monkeypatch, ValueError("no such axis"))
    with pytest.raises(ValueError, match="no such axis"):
        make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    assert found == ["cuda"]


@pytest.mark.parametrize("form", list(formats()))
def test_every_format_warms_up(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a segment calls was called before: all loops of the codec, and the sum in one call."""
    called: list[str] = []
    for name in ("is_summed_at_once", "warm_up_sums", "codec_of"):
        original = getattr(segment, name)

        def noting(*args: Any, of: Any = original, name: str = name) -> Any:
            called.append(name)
            return of(*args)

        monkeypatch.setattr(segment, name, noting)
    encode = encoding_of(usual_quant_spec(form, (256, 256)))
    warm_up([replace(_expression("linear"), encode=encode)], CPU)
    assert "codec_of" in called
    assert ("warm_up_sums" in called) == (form in (FP8_BLOCK, FP8_CHANNEL))


@pytest.mark.parametrize("columns", [96, 304, 512])
def test_groups_that_do_not_divide_the_usual_columns_warm_up(columns: int) -> None:
    """INT4 by groups of 512, or with one scale for each row."""
    encode = Encoding(INT4, (1, columns), DType.BF16, power_of_two=False)
    warm_up([replace(_expression("linear"), encode=encode)], CPU)
