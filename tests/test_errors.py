"""The error tree: exit codes, builtin kin, and problems that survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from raymerge import errors
from raymerge.errors import Problem, UserError

PROBLEMS = (Problem("r.yml:1:2", "x is 3.", "Write 4."), Problem("b", "it is gone.", ""))
USER_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UserError)
]


@pytest.mark.parametrize("kind", USER_ERRORS)
def test_problems_survive_pickling(kind: type[UserError]) -> None:
    again = pickle.loads(pickle.dumps(kind(PROBLEMS)))
    assert type(again) is kind
    assert (again.problems, again.exit_code) == (PROBLEMS, 2)
    assert str(again) == "r.yml:1:2: x is 3. Write 4.\nb: it is gone."


def test_long_names_are_shown_by_both_ends() -> None:
    name = "begin." + "x" * 100_000 + ".end"
    problem = Problem(
        "model", f"tensor '{name}' overlaps; 'model.norm.weight' does not.", "Download it again."
    )
    error = UserError(problem)
    assert error.problems == (problem,)
    assert len(str(error)) < 400
    for part in ("'begin.xxx", "xxx.end' overlaps", "'model.norm.weight' does not. Download it again."):
        assert part in str(error)


def test_of_many_problems_that_are_alike_the_first_are_shown_and_the_rest_counted() -> None:
    alike = [
        Problem("a", f"tensor 'model.layers.{number}.weight' has a hole.", "Mend it.")
        for number in range(500)
    ]
    other = Problem("b", "seed is not a number.", "Write one.")
    shown = errors.shown_problems([*alike, other])
    assert len(shown) < 30
    assert shown[0] == alike[0]
    assert shown[-1] == other
    assert f"And {500 - len(shown) + 1} more like this." in shown[-2].what
    assert errors.shown_problems([*alike[:3], other]) == (*alike[:3], other)
