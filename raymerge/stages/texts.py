"""Texts and conversations as windows of tokens of a model.

A text file is tokenised whole and cut into windows: the tokenizer's start-of-sequence token, if it has one,
and the tokens after it. A last window that is not full is left out unless it is the only one. Every token but
the first of a window is judged.

A chat file is JSONL, a conversation in ``messages`` a line. Each is a sequence of its own by the tokenizer's
chat template, of which what the assistant says is judged, the end of its turn included: what the template
marks as ``generation``, else what comes behind the prompt for a generation. A conversation that is longer
than a window is cut as a text is."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.errors import OptionError, PlanError, Problem
from raymerge.planner.calibration import most_positions
from raymerge.planner.inputs.sources import CHAT_ENDING, CalibrationText, Source
from raymerge.storage.temporary import fetched

USUAL_LENGTH = 512
"""Tokens of a window, unless the model reads fewer at once."""

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_TOKENIZER_FIRST = "Put the tokenizer's files beside its config.json"


def load_tokenizer(source: Source, *, instead: str = "") -> Any:
    """The tokenizer in the model's own directory; code that comes with the model is not run.

    ``instead``: what else to do without one. Raises PlanError: it has none that can be loaded."""
    # Slow to import, and only wanted where there are texts.
    from transformers import AutoTokenizer

    try:
        with fetched(source.checkpoint.root, (*source.checkpoint.companions, CONFIG_FILE)) as directory:
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what it raises depends on the class, the files and the libraries installed
        reason = " ".join(str(error).split())[:160]
        what = f"transformers cannot load its tokenizer, which texts need ({reason})."
        remedy = f"{_TOKENIZER_FIRST}, or {instead}." if instead else f"{_TOKENIZER_FIRST}."
        raise PlanError(Problem(source.name, what, remedy)) from error


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, to which the tokenizer adds nothing."""
    # Not verbose: a long text is meant to be cut.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Window(NamedTuple):
    tokens: npt.NDArray[np.int64]
    is_judged: npt.NDArray[np.bool_]
    """Of each token, whether it counts; the first does not, as nothing is before it."""

    @property
    def num_judged(self) -> int:
        return int(self.is_judged.sum())


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    windows: tuple[Window, ...]

    @property
    def num_judged(self) -> int:
        return sum(window.num_judged for window in self.windows)

    def first(self, num_windows: int) -> Text:
        return replace(self, windows=self.windows[:num_windows])


class TextReader:
    """Reads files as tokens of one model.

    The constructor raises PlanError: the model has no tokenizer; OptionError: windows that it cannot read."""

    def __init__(
        self,
        source: Source,
        *,
        length: int | None = None,
        num_tokens: int | None = None,
        judges_all: bool = False,
    ) -> None:
        """``length``: tokens of a window; None for 512, or what the model reads at once if that is less.
        ``num_tokens``: most judged tokens of a file. ``judges_all``: of conversations all that is said."""
        self._source = source
        self._judges_all = judges_all
        self._num_tokens = num_tokens
        check_numbers(length, num_tokens, source)
        most = most_positions(source) or USUAL_LENGTH
        self.length = min(USUAL_LENGTH, most) if length is None else length
        self._tokenizer = load_tokenizer(source)
        self._begin = token_ids(self._tokenizer, self._tokenizer.bos_token or "")[: self.length - 1]
        pair = source.pair
        self._rows = source.checkpoint.tensors[pair.embedding].shape[0] if pair is not None else None

    def read(self, paths: Sequence[str]) -> tuple[Text, ...]:
        """Raises PlanError: files that are not there or have nothing to judge, with all of them."""
        return self._read_all([(path, "") for path in paths])

    def read_planned(self, planned: Sequence[CalibrationText]) -> tuple[Text, ...]:
        """As ``read``; raises PlanError also for files that were written to since."""
        return self._read_all([(text.path, text.digest) for text in planned])

    def _read_all(self, files: Sequence[tuple[str, str]]) -> tuple[Text, ...]:
        texts: list[Text] = []
        problems: list[Problem] = []
        for path, digest in files:
            try:
                texts.append(self._read(path, digest))
            except PlanError as error:
                problems += error.problems
        if problems:
            raise PlanError(problems)
        return tuple(texts)

    def _read(self, path: str, digest: str) -> Text:
        try:
            stored = Path(os.path.expanduser(path)).read_bytes()
            content = io.TextIOWrapper(io.BytesIO(stored), encoding="utf-8-sig").read()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise PlanError(Problem(path, f"cannot be read: {reason}.", "Name a file of text.")) from error
        if digest and xxhash.xxh3_128_hexdigest(stored) != digest:
            what = "was written to since the plan was made."
            raise PlanError(Problem(path, what, "Give the command again, and leave the file as it is."))
        chats = self._conversations(path, content) if path.endswith(CHAT_ENDING) else [self._text(content)]
        pieces = (window for each in chats for window in self._windows(each))
        windows = tuple(self._limited(window for window in pieces if window.num_judged))
        if not windows:
            what = f"gives no token to judge in the tokenizer of {self._source.name}; a text needs two."
            raise PlanError(Problem(path, what, "Name a file with more text in it."))
        largest = max(int(window.tokens.max()) for window in windows)
        if self._rows is not None and largest >= self._rows:
            what = f"has the token {largest}, and the embedding of {self._source.name} has {self._rows} rows."
            remedy = "Give the model the tokenizer that belongs to it."
            raise PlanError(Problem(path, what, remedy))
        return Text(path, windows)

    def _text(self, content: str) -> Window:
        tokens = token_ids(self._tokenizer, content)
        step = self.length - len(self._begin)
        full = tokens[: len(tokens) // step * step] or tokens
        return _window([*self._begin, *full], [False] * len(self._begin) + [True] * len(full))

    def _windows(self, sequence: Window) -> Iterator[Window]:
        """A text or a conversation in pieces that each begin as a sequence does."""
        if len(sequence.tokens) <= self.length:
            yield sequence
            return
        count = len(self._begin)
        first = count if sequence.tokens[:count].tolist() == self._begin else 0
        step = self.length - count
        for start in range(first, len(sequence.tokens), step):
            piece = slice(start, start + step)
            yield _window(
                [*self._begin, *sequence.tokens[piece]], [*[False] * count, *sequence.is_judged[piece]]
            )

    def _limited(self, windows: Iterator[Window]) -> Iterator[Window]:
        left = self._num_tokens
        for window in windows:
            if left is not None and window.num_judged >= left:
                end = int(np.flatnonzero(window.is_judged)[left - 1]) + 1
                yield Window(window.tokens[:end], window.is_judged[:end])
                return
            left = None if left is None else left - window.num_judged
            yield window

    def _conversations(self, path: str, content: str) -> Iterator[Window]:
        # Strings of JSON may have the other line breaks of Unicode in them.
        for number, line in enumerate(content.split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = _conversation(where, line)
            try:
                yield from self._turns(row["messages"], row.get("tools"))
            except PlanError:
                raise
            except Exception as error:  # templates raise what they like, for messages that they refuse
                reason = " ".join(str(error).split())[:160]
                what = f"the chat template does not take it ({type(error).__name__}: {reason})."
                remedy = f"Give messages as the template of {self._source.name} expects them."
                raise PlanError(Problem(where, what, remedy)) from error

    def _turns(self, messages: list[Any], tools: Any) -> Iterator[Window]:
        self._check_template()
        if self._judges_all:
            tokens = token_ids(self._tokenizer, self._rendered(messages, tools))
            yield _window(tokens, [True] * len(tokens))
            return
        if self._marks_generation:
            made = self._tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            yield _window(made["input_ids"], [bool(each) for each in made["assistant_masks"]])
            return
        whole = self._rendered(messages, tools)
        # Templates refuse a prompt of no messages, so that an answer at the start is but a part of prompts.
        answers = [at for at, each in enumerate(messages) if at and each["role"] == "assistant"]
        turns = [self._rendered(messages[: at + 1], tools) for at in answers]
        # Behind the end of a turn some templates have a line break, which no model is asked for.
        spans = [
            (_common(self._rendered(messages[:at], tools, is_prompt=True), turn), len(turn.rstrip()))
            for at, turn in zip(answers, turns, strict=True)
        ]
        if all(whole.startswith(turn) for turn in turns):
            yield self._spanned(whole, spans)
            return
        # Templates that show earlier answers in another way than the last: each is judged as the last.
        for turn, span in zip(turns, spans, strict=True):
            yield self._spanned(turn, [span])

    def _spanned(self, text: str, spans: Sequence[tuple[int, int]]) -> Window:
        """A text of which the characters in some spans are judged."""
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # A token may hold the blank before an answer and its first word.
        judged = [
            any(begin < end and stop > first for first, end in spans)
            for begin, stop in made["offset_mapping"]
        ]
        return _window(made["input_ids"], judged)

    def _rendered(self, messages: list[Any], tools: Any, *, is_prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=is_prompt
            )
        )

    def _check_template(self) -> None:
        if not self._tokenizer.chat_template:
            what = "its tokenizer has no chat template, which conversations need."
            raise PlanError(Problem(self._source.name, what, "Name a file of text, or a model that chats."))
        if not (self._judges_all or self._marks_generation or self._tokenizer.is_fast):
            what = "its tokenizer does not tell where in a text its tokens are, which conversations need."
            raise PlanError(Problem(self._source.name, what, "Give it a tokenizer.json."))

    @cached_property
    def _marks_generation(self) -> bool:
        return bool(_GENERATION.search(str(self._tokenizer.chat_template or "")))


def check_numbers(length: int | None, num_tokens: int | None, source: Source) -> None:
    """Raises OptionError: windows that a model cannot read, or nothing to read."""
    most = most_positions(source)
    if length is not None and length < 2:
        what = f"windows of {length} tokens have none that follows another."
        raise OptionError(Problem("--length", what, "Give 2 or more, or leave it out."))
    if length is not None and most is not None and length > most:
        what = f"windows have {length} tokens, and {source.name} reads {most} at once."
        raise OptionError(Problem("--length", what, f"Give {most} or fewer, or leave it out."))
    if num_tokens is not None and num_tokens < 1:
        what = f"{num_tokens} tokens of a file are none."
        raise OptionError(Problem("--tokens", what, "Give 1 or more, or leave it out."))


def _window(tokens: Sequence[int], is_judged: Sequence[bool]) -> Window:
    window = Window(np.array(tokens, dtype=np.int64), np.array(is_judged, dtype=np.bool_))
    window.is_judged[:1] = False
    return window


def _conversation(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"is no JSON ({error})."
        raise PlanError(Problem(where, what, "Write one JSON object a line.")) from error
    messages = row.get("messages") if isinstance(row, dict) else None
    is_chat = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
    )
    if not messages or not is_chat:
        what = "has no list of 'messages' with a 'role' each."
        raise PlanError(Problem(where, what, 'Write {"messages": [{"role": ..., "content": ...}, ...]}.'))
    return dict(row)


def _common(prompt: str, text: str) -> int:
    """Characters that a text has in common with a prompt, from the start."""
    pairs = enumerate(zip(prompt, text, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(text)))
