"""An evaluator that is a running inference server, which gets the weights of each candidate."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    attempt_key,
    choice_of,
    read_list,
    read_positive,
    read_text,
    refusal,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import NUMBER, TEXT, accepts, declared, map_of, one_or_list
from raymerge.errors import OptionError, Problem
from raymerge.planner.calibration import most_positions
from raymerge.planner.inputs.sources import Source, open_reference, source_of
from raymerge.recipe_search.evaluators.command import COMMAND, CommandSettings, read_command, run_command
from raymerge.recipe_search.evaluators.engines import ENGINES, ServerApi
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluatorKind
from raymerge.recipe_search.evaluators.lm_eval import LM_EVAL, LmEvalSettings, require_lm_eval, run_tasks
from raymerge.recipe_search.evaluators.texts import TEXTS, TextFiles, TextsSettings
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import parse_recipes
from raymerge.runtime.driver.merge_store import open_merge
from raymerge.runtime.driver.tensor_stream import TensorStream
from raymerge.stages.texts import USUAL_LENGTH, Window

_URL = "{url}"
_PLACES = ("url", "transfer", "directory", "timeout", "after")
_KEYS = ("engine", *_PLACES)
_TRANSFERS, _AFTER = ("disk", "memory"), ("nothing", "best")
_FORM = "Write it as server: {url: http://127.0.0.1:8000, engine: vllm, texts: [held-out.txt]}."
_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    urls: tuple[str, ...]
    """One evaluator each."""
    engine: str
    transfer: str
    """``disk`` or ``memory``."""
    directory: str | None
    """Where candidates are written that the server reads; None for a place beside the output."""
    timeout: float
    """Seconds, of each call."""
    after: str
    """``nothing`` or ``best``: what the servers get when the search is done."""
    measure: str
    settings: Any
    """Of the measure."""


@accepts(
    map_of(
        {
            "url": one_or_list(TEXT),
            "engine": {"enum": [*ENGINES]},
            "transfer": {"enum": [*_TRANSFERS]},
            "directory": TEXT,
            "timeout": NUMBER,
            "after": {"enum": [*_AFTER]},
            **{kind.key: declared(kind.read) for kind in (TEXTS, COMMAND, LM_EVAL)},
        },
        "url",
        "engine",
    )
)
def read_server(value: object) -> ServerSettings:
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", _FORM)
    known = (*_KEYS, *MEASURES)
    faults = [unknown_key(key, known) for key in value if key not in known]
    urls = attempt_key(_read_urls, value, "url", faults)
    engine = attempt_key(choice_of(*ENGINES), value, "engine", faults)
    for key in ("url", "engine"):
        if value.get(key) is None:
            faults.append(Fault((), f"the key '{key}' is missing or empty.", _FORM))
    transfer = attempt_key(choice_of(*_TRANSFERS), value, "transfer", faults) or "disk"
    directory = attempt_key(read_text, value, "directory", faults)
    timeout = attempt_key(read_positive, value, "timeout", faults) or _TIMEOUT
    after = attempt_key(choice_of(*_AFTER), value, "after", faults) or "nothing"
    faults += _transfer_faults(engine, transfer, directory)
    measure = _measure(value, faults)
    settings = attempt(MEASURES[measure].read, value[measure], (measure,), faults) if measure else None
    if faults or urls is None or engine is None:
        raise FaultError(faults)
    return ServerSettings(urls, engine, transfer, directory, timeout, after, measure, settings)


def _read_urls(value: object) -> tuple[str, ...]:
    urls = read_list(_read_url, value if isinstance(value, list | tuple) else [value], _FORM)
    if not urls or len(set(urls)) < len(urls):
        raise unexpected(value, "addresses of different servers", _FORM)
    return urls


def _read_url(value: object) -> str:
    text = read_text(value)
    if not text.startswith(("http://", "https://")):
        raise refusal(f"'{text}' is not the address of a server.", "Write it like http://127.0.0.1:8000.")
    return text.rstrip("/")


def _transfer_faults(engine: str | None, transfer: str, directory: str | None) -> Iterator[Fault]:
    if engine == "vllm" and transfer == "memory":
        what = "vLLM takes tensors over NCCL or CUDA IPC, from a process with a GPU, and not over HTTP."
        remedy = (
            "Write transfer: disk. In a process of yours, raymerge.serving.vllm.weight_source gives them."
        )
        yield Fault(("transfer",), what, remedy)
    if transfer == "memory" and directory is not None:
        yield Fault(("directory",), "with transfer: memory nothing is written.", "Remove it.")


def _measure(value: Mapping[str, object], faults: list[Fault]) -> str:
    named = [key for key in MEASURES if value.get(key) is not None]
    if len(named) != 1:
        subject = f"{' and '.join(named)} all say" if named else "nothing says"
        what = f"{subject} what is measured of the server."
        faults.append(Fault((), what, f"Give one of: {', '.join(MEASURES)}."))
        return ""
    return named[0]


class ServedTexts:
    """The loss of texts by the log-probabilities that the server gives of their tokens."""

    def __init__(self, settings: TextsSettings, api: ServerApi) -> None:
        self._settings, self._api = settings, api
        self._files = TextFiles(settings)

    def __call__(self, source: Source) -> Mapping[str, float]:
        # A server counts the token that it generates.
        usual = min(USUAL_LENGTH, (most_positions(source) or USUAL_LENGTH + 1) - 1)
        texts = self._files.read(source, self._settings.length or usual)
        windows = [window for text in texts for window in text.windows]
        judged = self._api.logprobs([window.tokens.tolist() for window in windows])
        sums = iter([_sum(window, own) for window, own in zip(windows, judged, strict=True)])
        losses = [-math.fsum(next(sums) for _ in text.windows) / text.num_judged for text in texts]
        return self._files.metrics(losses)


def _sum(window: Window, logprobs: list[float]) -> float:
    judged = zip(window.is_judged[1:].tolist(), logprobs, strict=True)
    return math.fsum(each for is_judged, each in judged if is_judged)


class ServedCommand:
    def __init__(self, settings: CommandSettings, api: ServerApi) -> None:
        self._settings, self._api = settings, api

    def __call__(self, _: Source) -> Mapping[str, float]:
        return run_command(self._settings, _URL, self._api.url)


class ServedTasks:
    def __init__(self, settings: LmEvalSettings, api: ServerApi) -> None:
        require_lm_eval()
        self._settings, self._api = settings, api

    def __call__(self, source: Source) -> Mapping[str, float]:
        url = f"{self._api.url}/v1/completions"
        facts = {"model": self._api.model(), "base_url": url, "tokenizer_backend": "huggingface"}
        arguments = {**facts, "tokenizer": source.checkpoint.root}
        return run_tasks(self._settings, "local-completions", arguments)


@dataclass(frozen=True, slots=True)
class Measure:
    kind: EvaluatorKind
    """That measures the same without a server."""
    read: Callable[[object], Any]
    open: Callable[[Any, ServerApi], Callable[[Source], Mapping[str, float]]]


def _read_command(value: object) -> CommandSettings:
    return read_command(value, _URL)


MEASURES: Mapping[str, Measure] = {
    each.kind.key: each
    for each in (
        Measure(TEXTS, TEXTS.read, ServedTexts),
        Measure(COMMAND, _read_command, ServedCommand),
        Measure(LM_EVAL, LM_EVAL.read, ServedTasks),
    )
}


class ServedWeights:
    """Gives candidates to one server."""

    def __init__(
        self, settings: ServerSettings, api: ServerApi, merges: CandidateMerges, scratch: Path
    ) -> None:
        self._settings, self._merges, self._scratch = settings, merges, scratch
        self._engine = ENGINES[settings.engine](api)
        self._number = 0

    @contextmanager
    def serving(self, text: str) -> Iterator[Source]:
        """The candidate as a model, which the server has while the context is open, and after it.

        Raises EvaluationError; what a merge raises."""
        if self._settings.transfer == "memory":
            options = replace(self._merges.options, inline=True, workers=None, address=None)
            merges = self._merges.plan(parse_recipes(text), self._scratch / "candidate")
            with open_merge(merges, options) as source:
                self._engine.load_tensors(TensorStream(merges, options, on_event=lambda _: None))
                yield source
            return
        with self._written(text) as directory:
            self._engine.load_directory(directory)
            reference = ModelReference(path=str(directory))
            yield source_of(0, reference, open_reference(reference))

    @contextmanager
    def _written(self, text: str) -> Iterator[Path]:
        # A name of its own for each: nothing that a server has cached by path is of another candidate.
        root = os.path.abspath(os.path.expanduser(self._settings.directory or self._scratch))
        self._number += 1
        directory = Path(root) / f"candidate-{os.getpid()}-{self._number}"
        try:
            self._merges.write(text, directory)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class ServerEvaluator:
    def __init__(self, settings: ServerSettings, merges: CandidateMerges, scratch: Path) -> None:
        self._lock, url = _claimed(settings.urls, scratch.parent)
        api = ServerApi(url, settings.timeout)
        self._weights = ServedWeights(settings, api, merges, scratch)
        self._measure = MEASURES[settings.measure].open(settings.settings, api)

    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        assert share == 1.0
        with self._weights.serving(text) as source:
            return self._measure(source)

    def close(self) -> None:
        os.close(self._lock)


def _claimed(urls: tuple[str, ...], directory: Path) -> tuple[int, str]:
    """A server that no other evaluator of this search has, with a lock that ends with this process."""
    for number, url in enumerate(urls):
        lock = os.open(directory / f"server-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return lock, url
    raise OptionError(
        Problem("server", "each of the servers has an evaluator already.", "Name more of them.")
    )


def _finish(settings: ServerSettings, merges: CandidateMerges, scratch: Path, text: str) -> None:
    if settings.after == "best":
        for url in settings.urls:
            api = ServerApi(url, settings.timeout)
            with ServedWeights(settings, api, merges, scratch).serving(text):
                pass


SERVER = EvaluatorKind(
    key="server",
    read=read_server,
    metrics=lambda settings: MEASURES[settings.measure].kind.metrics(settings.settings),
    has_parts=False,
    fingerprint=lambda settings: MEASURES[settings.measure].kind.fingerprint(settings.settings),
    open=ServerEvaluator,
    places=lambda settings: len(settings.urls),
    changes_nothing=_PLACES,
    finish=_finish,
)
