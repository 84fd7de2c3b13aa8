"""What encoding changed in the numbers of an output, and where a run says so."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.command_line import run_command
from kits.merge_cases import INLINE, Merged, digests, merge
from kits.merges import write_recipe
from kits.quantised_merges import linear, merged_values, read_numbers
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking

from raymerge.api import plan, submit
from raymerge.errors import RecipeError
from raymerge.events import EncodingErrorsFound, Event, SegmentDone, Started
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.report import EncodingErrors, encoding_errors

RECORD = Path("raymerge", "encoding_errors.json")
_ROUNDED = 0.006
"""How far a number that is told with three digits may be from what it was."""
_ROLES = {
    ".layers.2.": "mtp",
    ".experts.": "expert",
    ".shared_experts.": "shared_expert",
    ".self_attn.": "attention",
    ".mlp.": "mlp",
}
"""Roles by parts of names, of which the first counts; layer 2 is one behind the main ones."""


def _recipe(models: Sequence[Path], **more: Any) -> dict[str, Any]:
    entries = [
        {"model": str(root), "parameters": {"weight": weight}}
        for root, weight in zip(models, (0.3, 0.7), strict=True)
    ]
    return {"merge_method": "linear", "models": entries, **more}


def _stored_name(root: Path, name: str) -> str:
    """What the codes of a tensor are called."""
    stored = read_tensors(root)
    return next(each for each in (f"{name}_packed", f"{name}_blocks", name) if each in stored)


def _expected(parents: Sequence[QuantisedModel], out: Path) -> dict[str, tuple[float, float]]:
    """Squared errors and squared values of what was encoded, from the definitions of the formats."""
    found, wanted = read_numbers(out), merged_values(parents, linear(0.3, 0.7))
    return {
        _stored_name(out, name): (
            float(((found[name].values - wanted[name][0]) ** 2).sum()),
            float((wanted[name][0] ** 2).sum()),
        )
        for name in parents[0].quantised
    }


def _relative(sums: Sequence[tuple[float, float]]) -> float:
    return math.sqrt(sum(each for each, _ in sums) / sum(each for _, each in sums))


def _role(name: str) -> str:
    return next(role for part, role in _ROLES.items() if part in name)


def _errors(merged: Merged) -> dict[str, float]:
    return {each.name: each.relative_error for each in merged.result.encoding_errors.tensors}


@pytest.fixture(scope="module", params=[deepseek_v3, kimi_k2_thinking, gpt_oss])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[QuantisedModel], Merged, Path]:
    """Two parents and their mean."""
    root = tmp_path_factory.mktemp("errors")
    parents = [request.param(root / str(seed), seed) for seed in (1, 2)]
    return parents, merge(_recipe([each.root for each in parents]), root / "out"), root / "out"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two parents in block FP8."""
    root = tmp_path_factory.mktemp("fp8")
    return [deepseek_v3(root / str(seed), seed).root for seed in (1, 2)]


# What is told


def test_each_tensor_has_the_error_of_its_decoded_codes(
    made: tuple[list[QuantisedModel], Merged, Path],
) -> None:
    parents, merged, out = made
    expected = {name: _relative([sums]) for name, sums in _expected(parents, out).items()}
    assert min(expected.values()) > 0.01
    assert _errors(merged) == pytest.approx(expected, rel=_ROUNDED)


def test_roles_are_told_as_if_each_were_one_tensor(made: tuple[list[QuantisedModel], Merged, Path]) -> None:
    parents, merged, out = made
    by_role: dict[str, dict[str, tuple[float, float]]] = {}
    for name, sums in _expected(parents, out).items():
        by_role.setdefault(_role(name), {})[name] = sums
    (event,) = merged.of(EncodingErrorsFound)
    assert event.roles == merged.result.encoding_errors.roles
    assert {line.role for line in event.roles} == by_role.keys()
    for line in event.roles:
        own = by_role[line.role]
        assert line.tensors == len(own)
        assert line.relative_error == pytest.approx(_relative(list(own.values())), rel=_ROUNDED)
        assert line.worst.relative_error == max(_errors(merged)[name] for name in own)
        assert line.worst.name in own


def test_the_record_keeps_every_tensor(made: tuple[list[QuantisedModel], Merged, Path]) -> None:
    _, merged, out = made
    kept = json.loads((out / RECORD).read_text())
    assert kept == json.loads(json.dumps(merged.result.encoding_errors.to_json()))
    assert {each["name"] for each in kept["tensors"]} == _errors(merged).keys()


def test_what_is_copied_has_no_error(fp8: list[Path], tmp_path: Path) -> None:
    rule = {"role": "expert", "merge_method": "passthrough", "sources": [str(fp8[0])]}
    found = _errors(merge(_recipe(fp8, methods=[rule]), tmp_path / "mixed"))
    assert any(".self_attn." in name for name in found)
    assert not any(".experts." in name for name in found)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(fp8[0])}], "warn_encoding_error": 1e-9}
    copied = merge(recipe, tmp_path / "copied")
    assert not copied.result.encoding_errors
    assert copied.of(EncodingErrorsFound) == []
    assert not (tmp_path / "copied" / RECORD).exists()


def test_kept_scales_lose_nothing(fp8: list[Path], tmp_path: Path) -> None:
    merged = merge(_recipe([fp8[0], fp8[0]], warn_encoding_error=1e-9), tmp_path / "out")
    assert set(_errors(merged).values()) == {0.0}
    assert merged.of(EncodingErrorsFound)[0].above is None


def test_codes_that_are_used_twice_have_their_error_twice(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", 1, layers=2)
    layers = [{"sources": [{"model": str(model), "layer_range": [0, 1]}]} for _ in range(2)]
    recipe = {"merge_method": "passthrough", "slices": layers, "out_format": "fp8_block"}
    merged = merge(recipe, tmp_path / "out")
    found = _errors(merged)
    assert 2 * sum(len(each.encoding_errors) for each in merged.result.receipts) == len(found)
    first = {name: error for name, error in found.items() if ".layers.0." in name}
    assert first
    assert {name.replace(".0.", ".1."): error for name, error in first.items()} == {
        name: error for name, error in found.items() if name not in first
    }


def test_a_run_that_goes_on_tells_of_all_segments(fp8: list[Path], tmp_path: Path) -> None:
    """The receipts of those that were made before are in the ledger."""
    recipe = _recipe(fp8)
    whole = merge(recipe, tmp_path / "whole")

    def abort(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipe, tmp_path / "out", INLINE, on_event=abort)
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments > 0 < len(merged.of(SegmentDone))
    assert merged.of(EncodingErrorsFound) == whole.of(EncodingErrorsFound)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


# The warning


def test_the_warning_counts_what_is_above_the_limit(fp8: list[Path], tmp_path: Path) -> None:
    errors = merge(_recipe(fp8), tmp_path / "out").result.encoding_errors
    ordered = sorted(each.relative_error for each in errors.tensors)
    assert errors.above(None) is None
    assert errors.above(ordered[-1]) is None, "what is told as no more than the limit is not above it"
    found = errors.above(ordered[0])
    assert found is not None
    assert found.tensors == sum(each > ordered[0] for each in ordered)
    assert found.worst.relative_error == ordered[-1]


@pytest.mark.parametrize(("limit", "is_told"), [(None, False), (0.5, False), (0.001, True)])
def test_a_run_warns_where_the_recipe_says(
    limit: float | None, is_told: bool, fp8: list[Path], tmp_path: Path
) -> None:
    lines = [f"- {{model: {root}, parameters: {{weight: 0.5}}}}" for root in fp8]
    asked = "" if limit is None else f"warn_encoding_error: {limit}\n"
    recipe = write_recipe(tmp_path, "merge_method: linear\nmodels:\n" + "\n".join(lines) + f"\n{asked}")
    outcome = run_command("submit", recipe, "-o", "out", "--inline", cwd=tmp_path)
    assert outcome.code == 0
    (place,) = [n for n, line in enumerate(outcome.text.splitlines()) if line.startswith("encoded: ")]
    roles = outcome.text.splitlines()[place + 1 : place + 6]
    assert [line.split(":")[0] for line in roles] == [
        "  attention", "  mlp", "  expert", "  shared_expert", "  mtp",
    ]  # fmt: skip
    assert ("warning: encoding changed" in outcome.text) == is_told
    assert (f"by more than {limit} (warn_encoding_error)" in outcome.text) == is_told


def test_the_limit_is_not_part_of_the_plan(fp8: list[Path]) -> None:
    digest = plan(_recipe(fp8)).digest
    assert plan(_recipe(fp8, warn_encoding_error=0.05)).digest == digest


@pytest.mark.parametrize(("value", "said"), [(0, "0 is not above 0"), ("much", "expected a number")])
def test_a_limit_that_is_none_is_refused(value: object, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(_recipe([Path("a"), Path("b")], warn_encoding_error=value))
    assert said in str(caught.value)
    assert "warn_encoding_error" in str(caught.value)


# Sums


def _rows_of_codes(planned: Plan) -> list[int]:
    return [row for row, scales in enumerate(planned["rows"].column("scales").to_pylist()) if scales >= 0]


def test_zeros_have_no_error(fp8: list[Path]) -> None:
    planned = plan(_recipe(fp8))
    found = encoding_errors(planned, {_rows_of_codes(planned)[0]: (0.0, 0.0)})
    assert [each.relative_error for each in found.tensors] == [0.0]


def test_how_sums_are_rounded_does_not_show(fp8: list[Path]) -> None:
    """They are over other tiles where the memory is another one."""
    planned = plan(_recipe(fp8))
    rows = _rows_of_codes(planned)

    def report(shift: float) -> EncodingErrors:
        return encoding_errors(planned, {row: (7e-4 * (row + 1) * shift, row + 1.0) for row in rows})

    assert report(1 + 1e-12) == report(1.0)
    assert {each.relative_error for each in report(1.0).tensors} == {0.0265}
    assert {line.relative_error for line in report(1.0).roles} == {0.0265}
