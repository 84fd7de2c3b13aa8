"""Errors of quantised merges, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama, write_json
from kits.command_line import run_command
from kits.float64_merges import linear
from kits.merge_cases import INLINE, Merged, digests, merge
from kits.merges import write_recipe
from kits.quantised_merges import MAKERS, merged_values, plain_twin, read_numbers
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one, piece, stack
from safetensors.torch import load_file, save_file

from raymerge.api import plan, submit
from raymerge.errors import NonFiniteError, RecipeError, UserError
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
    root = tmp_path_factory.mktemp("errors")
    parents = [request.param(root / str(seed), seed) for seed in (1, 2)]
    return parents, merge(_recipe([each.root for each in parents]), root / "out"), root / "out"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fp8")
    return [deepseek_v3(root / str(seed), seed).root for seed in (1, 2)]


@pytest.mark.sample(1)
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
    copied = merge(one(fp8[0], warn_encoding_error=1e-9), tmp_path / "copied")
    assert not copied.result.encoding_errors
    assert copied.of(EncodingErrorsFound) == []
    assert not (tmp_path / "copied" / RECORD).exists()


def test_kept_scales_lose_nothing(fp8: list[Path], tmp_path: Path) -> None:
    merged = merge(_recipe([fp8[0], fp8[0]], warn_encoding_error=1e-9), tmp_path / "out")
    assert set(_errors(merged).values()) == {0.0}
    assert merged.of(EncodingErrorsFound)[0].above is None


def test_codes_that_are_used_twice_have_their_error_twice(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", 1, layers=2)
    merged = merge(stack(*[piece(model, 0, 1)] * 2, out_format="fp8_block"), tmp_path / "out")
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


def test_the_warning_counts_what_is_above_the_limit(fp8: list[Path], tmp_path: Path) -> None:
    errors = merge(_recipe(fp8), tmp_path / "out").result.encoding_errors
    ordered = sorted(each.relative_error for each in errors.tensors)
    assert errors.above(None) is None
    assert errors.above(ordered[-1]) is None, "what is told as no more than the limit is not above it"
    found = errors.above(ordered[0])
    assert found is not None
    assert found.tensors == sum(each > ordered[0] for each in ordered)
    assert found.worst.relative_error == ordered[-1]


@pytest.mark.parametrize(("limit", "is_told"), [(0.5, False), (0.001, True)])
def test_a_run_warns_where_the_recipe_says(
    limit: float, is_told: bool, fp8: list[Path], tmp_path: Path
) -> None:
    lines = [f"- {{model: {root}, parameters: {{weight: 0.5}}}}" for root in fp8]
    asked = f"warn_encoding_error: {limit}\n"
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


def _rows_of_codes(planned: Plan) -> list[int]:
    return [row for row, scales in enumerate(planned["ops"].column("scales").to_pylist()) if scales >= 0]


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


Change = Callable[[torch.Tensor], torch.Tensor | None]
INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"
FUSED = "model.layers.1.mlp.experts.down_proj"


def _file_of(root: Path, name: str) -> Path:
    index = json.loads((root / INDEX).read_text())
    return root / str(index["weight_map"][name])


def _change(root: Path, name: str, change: Change) -> None:
    path = _file_of(root, name)
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is None:
        index = json.loads((root / INDEX).read_text())
        del index["weight_map"][name]
        write_json(root / INDEX, index)
    save_file(tensors if changed is None else {**tensors, name: changed}, path, metadata={"format": "pt"})


def _with_byte(place: int, byte: int) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).view(-1)[place] = byte
        return tensor

    return change


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[1] = float("nan")
    return tensor


def _start(path: Path, name: str) -> int:
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    begin: int = header[name]["data_offsets"][0]
    return 8 + size + begin


NOT_FINITE: dict[str, tuple[str, str, str, Change, int]] = {
    "a code of FP8": ("DeepSeek-V3 F32", O_PROJ, O_PROJ, _with_byte(701, 0xFF), 701),
    "a scale in F32": ("DeepSeek-V3 F32", O_PROJ, f"{O_PROJ}_scale_inv", _with_nan, 4),
    "a scale in F8_E8M0": ("DeepSeek-V3 F8_E8M0", O_PROJ, f"{O_PROJ}_scale_inv", _with_byte(1, 255), 1),
    "a scale in U8": ("DeepSeek-V3 U8", O_PROJ, f"{O_PROJ}_scale_inv", _with_byte(1, 255), 1),
    "a scale of MXFP4": ("gpt-oss", f"{FUSED}_blocks", f"{FUSED}_scales", _with_byte(70, 255), 70),
    "a scale of INT4": ("Kimi-K2-Thinking", f"{DOWN}_packed", f"{DOWN}_scale", _with_nan, 2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", NOT_FINITE)
def test_what_is_not_finite_is_refused_where_it_is(case: str, tmp_path: Path) -> None:
    """The message names the model, the output's tensor, and the first byte in the source that is at fault."""
    kind, codes, harmed, change, place = NOT_FINITE[case]
    good, bad = (MAKERS[kind](tmp_path / name, seed).root for seed, name in enumerate(("good", "bad")))
    path = _file_of(bad, harmed)
    _change(bad, harmed, change)
    where = f"holds NaN or infinity, here first at byte {_start(path, harmed) + place} of {path.name}"
    with pytest.raises(NonFiniteError, match=where) as caught:
        merge(mean_of(good, bad), tmp_path / "out")
    assert str(caught.value).startswith(f"{bad}: {codes}: ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NonFiniteError, match=where):
        merge(one(bad, dtype="bfloat16"), tmp_path / "out")


BEYOND: dict[str, tuple[str, str, dict[str, Change]]] = {
    "FP8": (
        "DeepSeek-V3 F32",
        O_PROJ,
        {f"{O_PROJ}_scale_inv": lambda scale: scale.fill_(1e36), O_PROJ: lambda codes: codes.fill_(448.0)},
    ),
    "MXFP4": (
        "gpt-oss",
        FUSED,
        # Of one expert, as several are made at the same time.
        {
            f"{FUSED}_scales": lambda all_: all_[0].fill_(254),
            f"{FUSED}_blocks": lambda all_: all_[0].fill_(0x77),
        },
    ),
}


@pytest.mark.parametrize("form", BEYOND)
def test_scales_that_make_numbers_beyond_float32_are_told_as_such(form: str, tmp_path: Path) -> None:
    """No code and no scale is NaN or infinite, but their products are."""
    kind, name, changes = BEYOND[form]
    bad = MAKERS[kind](tmp_path / "bad", 1).root
    for harmed, change in changes.items():
        _change(bad, harmed, change)
    where = f"byte {_start(_file_of(bad, harmed), harmed)} of {_file_of(bad, harmed).name}"
    what = f"{bad}: {name}: the source holds codes with scales that make numbers beyond float32"
    with pytest.raises(NonFiniteError, match=f"^{re.escape(what)}, here first at {where}"):
        merge(mean_of(bad, dtype="bfloat16"), tmp_path / "out")


def test_a_merge_too_large_for_float32_is_not_blamed_on_codes(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    for root in models:
        _change(root, f"{O_PROJ}_scale_inv", lambda scale: scale * 1e4)
    large = {"role": "attention", "layers": 1, "parameters": {"weight": 3e38, "normalize": False}}
    recipe = mean_of(*models, methods=[large])
    with pytest.raises(NonFiniteError, match=r"the sources are finite, but .* do not fit F32") as caught:
        merge(recipe, tmp_path / "out")
    assert str(caught.value).startswith(f"{O_PROJ}: ")


def _said(*roots: Path) -> str:
    try:
        problems = plan(mean_of(*roots)).problems
    except UserError as error:
        problems = error.problems
    assert problems
    return "\n".join(str(problem) for problem in problems)


def test_a_config_of_fp8_with_weights_in_bfloat16_is_refused_with_both_facts(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "model", 1)
    bad = plain_twin(model, tmp_path / "bad").root
    write_json(bad / "config.json", read_config(model.root))
    said = _said(model.root, bad)
    assert said.startswith(f"{bad}: ")
    assert "config.json says that weights are quantised by fp8" in said
    assert "no tensor is: all are BF16, F32" in said
