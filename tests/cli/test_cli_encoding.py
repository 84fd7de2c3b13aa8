"""What a finished run says on the screen of what encoding changed."""

from __future__ import annotations

import io
import json

from rich.console import Console

from raymerge.cli.render.duplicates import encoding_lines, encoding_warning
from raymerge.cli.render.progress import PlainProgress
from raymerge.events import EncodingErrorsFound
from raymerge.merge_plan.report import ErrorsAbove, RoleError, TensorError

ATTENTION = TensorError("model.layers.0.self_attn.o_proj.weight", "attention", 0.0266)
EXPERT = TensorError("model.layers.1.mlp.experts.3.up_proj.weight", "expert", 0.031)
ROLES = (RoleError("attention", 1, 0.0266, ATTENTION), RoleError("expert", 24, 0.0262, EXPERT))
ABOVE = ErrorsAbove(0.03, 2, EXPERT)


def test_each_role_has_a_line() -> None:
    assert list(encoding_lines(EncodingErrorsFound(ROLES, None))) == [
        "encoded: 25 tensors as codes with scales; relative error that this added:",
        "  attention: 0.0266 in 1 tensor, at most 0.0266 in model.layers.0.self_attn.o_proj.weight",
        "  expert: 0.0262 in 24 tensors, at most 0.031 in model.layers.1.mlp.experts.3.up_proj.weight",
    ]


def test_the_warning_says_how_many_which_and_what_to_do() -> None:
    assert encoding_warning(ABOVE) == (
        "warning: encoding changed 2 tensors by more than 0.03 (warn_encoding_error), "
        "model.layers.1.mlp.experts.3.up_proj.weight most of all, by 0.031; "
        "'{role: expert, value: bf16}' as the first line of out_format keeps that role in bfloat16"
    )


def test_the_warning_stands_below_the_roles() -> None:
    stream = io.StringIO()
    PlainProgress(Console(file=stream, width=80), "out")(EncodingErrorsFound(ROLES, ABOVE))
    assert stream.getvalue().splitlines() == [
        *encoding_lines(EncodingErrorsFound(ROLES, ABOVE)),
        encoding_warning(ABOVE),
    ]


def test_as_json_it_is_an_event() -> None:
    told = json.loads(json.dumps(EncodingErrorsFound(ROLES, ABOVE).to_json()))
    assert told["event"] == "encoding_errors_found"
    assert told["roles"][1]["worst"]["name"] == EXPERT.name
    assert (told["above"]["tensors"], told["above"]["limit"]) == (2, 0.03)
