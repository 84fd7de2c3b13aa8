"""An evaluator that is the loss on held-out texts: nats per token, and nothing is written.

A candidate is read layer by layer as it is made. What the one before it made alike is not made again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean

import xxhash

from raymerge.deferred import torch
from raymerge.device_numerics import Fallback, choose_device, torch_threads
from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt_key,
    between,
    read_list,
    read_text,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import TEXT, WHOLE_NUMBER, accepts, any_of, list_of, map_of
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import Source
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluatorKind
from raymerge.recipes.load import parse_recipes
from raymerge.runtime.driver.merge_store import open_merge
from raymerge.runtime.workers.sizing import free_memory
from raymerge.stages.loss import Evaluator as LossEvaluator
from raymerge.stages.loss import TextLoss
from raymerge.stages.texts import Text, TextReader

_MEAN = "mean"
"""The metric that is the mean over the files."""
_KEYS = ("files", "length", "tokens")
_NUM_SHARES = 3
# Of the memory: what makes a candidate, what stays of it for the next, and what runs it.
_FORM = "Write it as texts: [held-out.txt, chats.jsonl]."


@dataclass(frozen=True, slots=True)
class TextsSettings:
    files: Mapping[str, str]
    """By the name of the metric."""
    length: int | None = None
    """Tokens of a window."""
    tokens: int | None = None
    """Most judged tokens of each file."""


_FILES = any_of(list_of(TEXT), {"type": "object", "additionalProperties": TEXT, "minProperties": 1})
_COUNTS = {"length": {**WHOLE_NUMBER, "minimum": 2}, "tokens": {**WHOLE_NUMBER, "minimum": 1}}


@accepts(any_of(_FILES, map_of({"files": _FILES, **_COUNTS}, "files")))
def read_texts(value: object) -> TextsSettings:
    is_map = isinstance(value, Mapping) and "files" in value
    block = value if isinstance(value, Mapping) and is_map else {"files": value}
    faults = [unknown_key(key, _KEYS) for key in block if key not in _KEYS]
    files = attempt_key(_read_files, block, "files", faults)
    if block["files"] is None:
        faults.append(Fault((), "the key 'files' is missing or empty.", _FORM))
    if not is_map:
        faults = [replace(each, path=each.path[1:]) for each in faults]
    length = attempt_key(between(2), block, "length", faults)
    tokens = attempt_key(between(1), block, "tokens", faults)
    if faults or files is None:
        raise FaultError(faults)
    return TextsSettings(files, length, tokens)


def _read_files(value: object) -> Mapping[str, str]:
    if isinstance(value, Mapping):
        faults: list[Fault] = []
        named = {str(key): attempt_key(read_text, value, key, faults) or "" for key in value}
        if faults:
            raise FaultError(faults)
    elif isinstance(value, list | tuple):
        paths = read_list(read_text, value, _FORM)
        named = {Path(path).stem: path for path in paths}
        if len(named) < len(paths):
            raise unexpected(value, "files of different names", "Write {name: file}.")
    else:
        raise unexpected(value, "a list of files", _FORM)
    if _MEAN in named or not named:
        raise unexpected(value, f"files of other names than '{_MEAN}'", "Write {name: file}.")
    return named


class TextFiles:
    """The files as tokens, read once for each tokenizer."""

    def __init__(self, settings: TextsSettings) -> None:
        self._settings = settings
        self._texts: dict[str, tuple[Text, ...]] = {}

    def read(self, source: Source, length: int | None) -> tuple[Text, ...]:
        """``length``: tokens of a window."""
        tokenizer = _tokenizer_digest(source.checkpoint.root)
        if tokenizer not in self._texts:
            reader = TextReader(source, length=length, num_tokens=self._settings.tokens)
            self._texts[tokenizer] = reader.read([*self._settings.files.values()])
        return self._texts[tokenizer]

    def metrics(self, losses: Sequence[float]) -> Mapping[str, float]:
        by_name = dict(zip(self._settings.files, map(_rounded, losses), strict=True))
        return {_MEAN: _rounded(fmean(by_name.values())), **by_name}


class TextsEvaluator:
    def __init__(self, settings: TextsSettings, merges: CandidateMerges, scratch: Path) -> None:
        self._settings, self._merges, self._scratch = settings, merges, scratch
        # Whoever reads settings, such as a driver, does without torch.
        from raymerge.execute.op_cache import OpCache

        self._memory = merges.options.memory or free_memory() // 2
        self._cache = OpCache(self._memory // _NUM_SHARES)
        self._files = TextFiles(settings)
        self._device = Fallback(choose_device(merges.options.device))

    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        share = self._memory // _NUM_SHARES
        options = replace(self._merges.options, inline=True, workers=None, address=None, memory=share)
        merges = self._merges.plan(parse_recipes(text), self._scratch / "candidate")
        with open_merge(merges, options, cache=self._cache) as source:
            texts = [_first(each, share) for each in self._files.read(source, self._settings.length)]

            def measure(device: torch.device, _: str) -> Sequence[TextLoss]:
                own = LossEvaluator(
                    texts, memory=self._memory, spill=self._scratch, device=device, num_shares=_NUM_SHARES
                )
                return own.losses(source)

            with torch_threads(self._merges.options.threads):
                losses = self._device.run(measure)
        return self._files.metrics([each.loss for each in losses])

    def close(self) -> None: ...


def _tokenizer_digest(root: str) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(Path(root).iterdir()):
        if path.is_file() and path.suffix != ".safetensors":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _rounded(loss: float) -> float:
    """To what float32 arithmetic tells: digits behind that depend on the number of threads."""
    return float(f"{loss:.7g}")


def _first(text: Text, share: float) -> Text:
    return text.first(ceil(share * len(text.windows)))


def _fingerprint(settings: TextsSettings) -> object:
    """Raises PlanError: a file cannot be read."""
    digests: dict[str, str] = {}
    for path in settings.files.values():
        try:
            digests[path] = xxhash.xxh3_128_hexdigest(Path(os.path.expanduser(path)).read_bytes())
        except OSError as error:
            what = f"cannot be read: {error.strerror}."
            raise PlanError(Problem(path, what, "Name a file of text.")) from error
    return digests


TEXTS = EvaluatorKind(
    key="texts",
    read=read_texts,
    metrics=lambda _: {_MEAN: -1.0},
    has_parts=True,
    fingerprint=_fingerprint,
    open=TextsEvaluator,
)
