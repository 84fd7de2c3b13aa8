"""An evaluator that is tasks of lm-eval, by its own API; a metric is called ``task/acc``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree
from typing import Any

from raymerge.device_numerics import choose_device
from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt_key,
    between,
    read_integer,
    read_list,
    read_positive,
    read_switch,
    read_text,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import TEXT, accepts, declared, list_of, map_of
from raymerge.errors import OptionError, Problem, first_line
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluationError, EvaluatorKind

_READERS = {
    "num_fewshot": between(0),
    "limit": read_positive,
    "batch_size": read_integer,
    "include_path": read_text,
    "apply_chat_template": read_switch,
}
_KEYS = ("tasks", *_READERS, "model_args")
_FORM = "Write it as lm_eval: {tasks: [arc_easy], limit: 200}."
_NO_FILTER = "none"


@dataclass(frozen=True, slots=True)
class LmEvalSettings:
    """Named as in ``lm_eval.simple_evaluate``; what is None is left to it."""

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    """Examples of each task; a part of them below 1."""
    batch_size: int | None = None
    include_path: str | None = None
    """A directory with more tasks."""
    apply_chat_template: bool | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)


@accepts(
    map_of(
        {
            "tasks": list_of(TEXT),
            **{key: declared(read) for key, read in _READERS.items()},
            "model_args": {"type": "object"},
        },
        "tasks",
    )
)
def read_lm_eval(value: object) -> LmEvalSettings:
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", _FORM)
    faults = [unknown_key(key, _KEYS) for key in value if key not in _KEYS]
    tasks = attempt_key(_read_tasks, value, "tasks", faults)
    if value.get("tasks") is None:
        faults.append(Fault((), "the key 'tasks' is missing or empty.", _FORM))
    rest: dict[str, Any] = {key: attempt_key(read, value, key, faults) for key, read in _READERS.items()}
    arguments = attempt_key(_read_arguments, value, "model_args", faults)
    if faults or tasks is None:
        raise FaultError(faults)
    return LmEvalSettings(tasks, **rest, model_args=arguments or {})


def _read_tasks(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise unexpected(value, "a list of tasks", _FORM)
    return read_list(read_text, value, _FORM)


def _read_arguments(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", "Write it as model_args: {max_length: 4096}.")
    return {str(key): each for key, each in value.items()}


class LmEvalEvaluator:
    """Gives lm-eval the candidate as a directory, for its model ``hf``."""

    def __init__(self, settings: LmEvalSettings, merges: CandidateMerges, scratch: Path) -> None:
        require_lm_eval()
        self._settings, self._merges, self._scratch = settings, merges, scratch

    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        assert share == 1.0
        directory = self._scratch / "candidate"
        # Of itself it takes a GPU, also where there is none.
        device = str(choose_device(self._merges.options.device))
        try:
            self._merges.write(text, directory)
            return run_tasks(self._settings, "hf", {"pretrained": str(directory)}, device=device)
        finally:
            rmtree(directory, ignore_errors=True)

    def close(self) -> None: ...


def require_lm_eval() -> Any:
    try:
        return import_module("lm_eval")
    except ImportError as error:
        what = f"lm-eval cannot be imported ({first_line(error)})."
        raise OptionError(Problem("lm_eval", what, "Give: pip install 'raymerge[lm-eval]'.")) from error


def run_tasks(
    settings: LmEvalSettings, model: str, arguments: Mapping[str, Any], *, device: str | None = None
) -> Mapping[str, float]:
    """The metrics of a model as lm-eval calls its kinds, with arguments; raises EvaluationError."""
    lm_eval = require_lm_eval()
    given = {key: each for key, each in asdict(settings).items() if each is not None}
    tasks, include = list(given.pop("tasks")), given.pop("include_path", None)
    own = given.pop("model_args")
    try:
        manager = import_module("lm_eval.tasks").TaskManager(include_path=include)
        results = lm_eval.simple_evaluate(
            model=model,
            model_args={**arguments, **own},
            tasks=tasks,
            task_manager=manager,
            device=device,
            # Errors of the mean are not looked at.
            bootstrap_iters=0,
            log_samples=False,
            **given,
        )
    except Exception as error:  # whatever tasks and models raise is about this candidate
        raise EvaluationError(f"lm-eval: {type(error).__name__}: {first_line(error)}") from error
    return metrics_of(results["results"])


def metrics_of(results: Mapping[str, Mapping[str, object]]) -> Mapping[str, float]:
    """``{"arc_easy": {"acc,none": 0.5}}`` as ``{"arc_easy/acc": 0.5}``; other filters stay in the name."""
    metrics: dict[str, float] = {}
    for task, values in results.items():
        for key, value in values.items():
            name, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or not chosen or name.endswith("_stderr"):
                continue
            metrics[f"{task}/{name}" if chosen == _NO_FILTER else f"{task}/{key}"] = float(value)
    return metrics


def _version() -> str:
    try:
        return version("lm_eval")
    except PackageNotFoundError:
        return ""


LM_EVAL = EvaluatorKind(
    key="lm_eval",
    read=read_lm_eval,
    metrics=lambda _: {},
    has_parts=False,
    fingerprint=lambda _: _version(),
    open=LmEvalEvaluator,
)
