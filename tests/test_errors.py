"""The error tree: exit codes, builtin kin, and problems that survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from raymerge import errors
from raymerge.errors import IncompleteError, Problem, RaymergeError, UserError

PROBLEMS = (Problem("r.yml:1:2", "x is 3.", "Write 4."), Problem("b", "it is gone.", ""))
USER_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UserError)
]


@pytest.mark.parametrize("kind", USER_ERRORS)
def test_problems_survive_pickling(kind: type[UserError]) -> None:
    again = pickle.loads(pickle.dumps(kind(PROBLEMS)))
    assert type(again) is kind
    assert again.problems == PROBLEMS
    assert str(again) == "r.yml:1:2: x is 3. Write 4.\nb: it is gone."


@pytest.mark.parametrize("kind", USER_ERRORS)
def test_a_users_error_ends_with_two(kind: type[UserError]) -> None:
    assert kind.exit_code == 2
    assert kind(PROBLEMS[0]).problems == PROBLEMS[:1]


def test_other_exit_codes() -> None:
    assert RaymergeError.exit_code == 1
    assert IncompleteError.exit_code == 3


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.RecipeError, ValueError),
        (errors.CheckpointError, ValueError),
        (errors.PlanError, ValueError),
        (errors.TargetError, FileExistsError),
        (errors.IncompleteError, RuntimeError),
    ],
)
def test_errors_can_be_caught_as_their_builtin_kin(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
