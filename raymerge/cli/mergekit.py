"""mergekit's command lines: what becomes of its options here, and what its commands are called.

The page docs/how-to/from-mergekit.md tells the same to people; a test compares the two."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand, TyperGroup

from raymerge.cli.render.screen import make_console, printable
from raymerge.errors import OptionError, Problem

VALUE = "VALUE"
"""Stands for an option's value."""
PAGE = "docs/how-to/from-mergekit.md"
_OPTION = re.compile("--|-[A-Za-z]")
"""How a word begins that is no value."""
_SIZES = {"K": "KB", "M": "MB", "B": "GB"}
"""Units of ``--out-shard-size``: mergekit counts bytes, whatever its help says."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of an option; one of the first four fields says it."""

    here: tuple[str, ...] = ()
    """Arguments in its place."""
    variable: str = ""
    """The environment variable that takes its value."""
    reason: str = ""
    """Why it has no effect."""
    remedy: str = ""
    """Why it is refused; further lines are text to copy."""
    takes_value: bool = False

    def filled(self, value: str) -> list[str]:
        return [value if word == VALUE else word for word in self.here]


Answers = Mapping[str, Answer]
_Row = tuple[str, Answer]


def _either(name: str, reason: str) -> _Row:
    return f"--{name} --no-{name}", Answer(reason=reason)


def _valued(names: str, *here: str, reason: str = "", remedy: str = "", variable: str = "") -> _Row:
    return names, Answer(here, variable, reason, remedy, takes_value=True)


def _recipe(lines: str) -> str:
    return f"What changes the result is written in the recipe. Leave the option out, and add there:\n{lines}"


_EVERYWHERE: tuple[_Row, ...] = (
    ("--cuda --gpu-rich --multi-gpu", Answer(("--device", "cuda"))),
    ("--no-cuda", Answer(("--device", "cpu"))),
    _valued("--transformers-cache", variable="HF_HUB_CACHE"),
    _valued("--lora-merge-cache", reason="adapters are added while reading"),
    _valued("--lora-merge-dtype", reason="adapters are added in float32"),
    _either("allow-crimes", "whatever has tensors that agree can be merged"),
    _either("trust-remote-code", "no code of a model is run"),
    ("-v", Answer(reason="every event is in raymerge/events.jsonl of the output")),
    _either("quiet", "'> /dev/null' is quiet"),
    _either("low-cpu-memory", "--memory is the limit"),
    _either("lazy-unpickle", "pickles are always read lazily"),
    _either("read-to-gpu", "always so where a GPU is used"),
    _valued("-j --num-threads", reason="--workers and --threads say how many"),
    _either("async-write", "always so"),
    _valued("--write-threads", reason="writing overlaps with the rest by itself"),
    ("--copy-tokenizer --write-model-card --safe-serialization", Answer(reason="always so")),
    ("--no-copy-tokenizer", Answer(reason="the tokenizer is copied all the same")),
    ("--no-write-model-card", Answer(reason="the card is written all the same")),
    _either("clone-tensors", "every tensor has bytes of its own"),
    ("--no-unsafe-truncate-embeddings --no-multi-gpu", Answer(reason="the default")),
    ("--no-safe-serialization", Answer(remedy="Leave it out: the output is always safetensors.")),
)


def _answers(*rows: _Row) -> Answers:
    return MappingProxyType({name: answer for names, answer in rows for name in names.split()})


SUBMIT = _answers(
    *_EVERYWHERE,
    _valued("--random-seed", remedy=_recipe(f"seed: {VALUE}")),
    _valued("--out-shard-size", remedy=_recipe(f"shard_size: {VALUE}")),
    ("--unsafe-truncate-embeddings", Answer(remedy=_recipe("embedding_sizes: common"))),
    # mergekit-moe
    ("--load-in-4bit --load-in-8bit", Answer(reason="one layer of the base is in memory at a time")),
    ("--i-understand-this-is-not-useful-without-training", Answer(reason="nothing asks")),
    # mergekit-multi
    _valued("--out-path", "--output", VALUE),
    _valued("-I --intermediate-dir", "--steps", VALUE, "--keep-intermediates"),
    _either("lazy", "a step is made again where its plan, sources or files are others"),
    # mergekit-pytorch
    (
        "-i --tensor-intersection",
        Answer(remedy=_recipe("extra_tensors: drop          # what the base lacks is left out")),
    ),
    (
        "-u --tensor-union",
        Answer(remedy=_recipe("missing_tensors: copy_base   # what only the base has stays")),
    ),
)
"""Options of mergekit-yaml, -moe, -multi and -pytorch."""

_PATTERN = "Regular expressions are not read; * and ? are, against the whole name of a tensor. For example:\n"
EXTRACT = _answers(
    *_EVERYWHERE,
    _valued("--random-seed", reason="nothing is random"),
    _valued("--out-shard-size", reason="an adapter is one file"),
    ("--unsafe-truncate-embeddings", Answer(("--embeddings", "skip"))),
    _valued("--model", VALUE),
    _valued("--base-model", "--base", VALUE),
    _valued("--out-path", "--output", VALUE),
    _valued("--max-rank", "--rank", VALUE),
    ("--embed-lora", Answer(("--embeddings", "adapter"))),
    ("--no-embed-lora", Answer(("--embeddings", "full"))),
    ("--skip-undecomposable", Answer(("--rest", "skip"))),
    _either("distribute-scale", "both factors have their share"),
    _valued("-i --include-regex", remedy=f"{_PATTERN}--include '*.self_attn.*'"),
    _valued("-e --exclude-regex", remedy=f"{_PATTERN}--exclude '*.mlp.*'"),
    _valued("--save-module", remedy="Leave it out: --embeddings and --rest say what is saved whole."),
    _valued("--sv-epsilon", remedy="Say which share of a change is enough:\n--energy 0.99"),
)
"""Options of mergekit-extract-lora."""

_ONE_RULE = "Leave it out: the rows of tokens that the model lacks are made by --approximation."
TRANSPLANT = _answers(
    *_EVERYWHERE,
    _valued("--random-seed", reason="nothing is random"),
    _valued("--out-shard-size", remedy="Leave it out: files have 5 GB at most."),
    ("--unsafe-truncate-embeddings", Answer(reason="the donor's tokenizer says how many rows there are")),
    _valued("-k", "--k", VALUE),
    _valued("-a --approximation-method", "--approximation", VALUE),
    (
        "-c --cosine-similarity -nc --no-cosine-similarity",
        Answer(reason="of common_interpolation, which is not there"),
    ),
    _valued("-w --weight-scheme", reason="of common_interpolation, which is not there"),
    _valued("-s --subword-method", remedy="Leave it out: --approximation subword takes the mean."),
    _valued("--batch-size", reason="--memory is the limit"),
    _valued("-pm --prefix-match", remedy=_ONE_RULE),
    _valued("-bm --byte-match", reason="a byte such as <0x0A> always has the row of the same byte"),
    ("--magikarp", Answer(remedy="Leave it out: all tokens that both models have are used.")),
    ("--no-magikarp", Answer(reason="the default")),
    _valued("-nvn --new-vocab-noise", remedy="Leave it out: new rows get no noise."),
    _valued("-nvs --new-vocab-scale", remedy="Leave it out: new rows are not scaled."),
)
"""Options of mergekit-tokensurgeon."""
_ACCEPTED: Mapping[str, Answers] = MappingProxyType(
    {"submit": SUBMIT, "extract_lora": EXTRACT, "transplant": TRANSPLANT}
)


@dataclass(frozen=True, slots=True)
class Translation:
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    without_effect: Mapping[str, str]
    """Reasons by option."""
    problems: tuple[Problem, ...]


def translate(arguments: Sequence[str], answers: Answers) -> Translation:
    """A command line with mergekit's options as one without; others are left as they are."""
    ours: list[str] = []
    variables: dict[str, str] = {}
    reasons: dict[str, str] = {}
    problems: list[Problem] = []
    for word, answer, value in _options(arguments, answers):
        if answer is None:
            ours.append(word)
            continue
        if misused := _misused(word, answer, value):
            problems.append(misused)
            continue
        ours += answer.filled(value)
        if answer.variable:
            variables[answer.variable] = value
        if answer.reason:
            reasons[word] = answer.reason
        if answer.remedy:
            remedy = answer.remedy.replace(VALUE, _size(value) if word == "--out-shard-size" else value)
            problems.append(Problem(word, "this option of mergekit is not accepted here.", remedy))
    return Translation(tuple(ours), variables, reasons, tuple(problems))


def _misused(name: str, answer: Answer, value: str) -> Problem | None:
    if answer.takes_value and (not value or _OPTION.match(value)):
        return Problem(name, "a value is expected behind it.", "Add it, or leave the option out.")
    if value and not answer.takes_value:
        return Problem(name, f"'{value}' stands behind it, and it takes no value.", f"Write {name} alone.")
    return None


def _options(arguments: Sequence[str], answers: Answers) -> Iterator[tuple[str, Answer | None, str]]:
    """Each word with its answer and value; words of ours, and all behind "--", without."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = list(reversed(arguments[:end]))
    while words:
        word = words.pop()
        name, equals, value = word.partition("=")
        if name not in answers and not word.startswith("--"):
            # Several letters are one value, or -vv.
            name, equals, value = word[:2], word[2:], word[2:].lstrip(word[1:2])
            value = word[2:] if name in answers and answers[name].takes_value else value
        answer = answers.get(name)
        if answer is None:
            yield word, None, ""
        elif answer.takes_value and not equals:
            has_value = bool(words) and not _OPTION.match(words[-1])
            yield name, answer, words.pop() if has_value else ""
        else:
            yield name, answer, value
    yield from ((word, None, "") for word in arguments[end:])


def _size(text: str) -> str:
    number, unit = text[:-1], text[-1:].upper()
    return f"{number}{_SIZES[unit]}" if unit in _SIZES else f"{text}B"


def command_class(verb: str) -> type[TyperCommand]:
    """The class of a command, which accepts what mergekit's has beside its own options."""
    return _accepting(_ACCEPTED[verb]) if verb in _ACCEPTED else TyperCommand


def _accepting(answers: Answers) -> type[TyperCommand]:

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            translation = translate(args, answers)
            own = {name for each in self.params for name in each.opts}
            problems = (*translation.problems, *_misspelt(translation.arguments, own, answers))
            if problems:
                raise OptionError(problems)
            # Before anything reads it: the library that fetches models does so when it is imported.
            os.environ.update(translation.variables)
            if translation.without_effect:
                pairs = translation.without_effect.items()
                reasons = ", ".join(f"{name} ({reason})" for name, reason in pairs)
                make_console(sys.stderr).print(f"not needed here: {printable(reasons)}", soft_wrap=True)
            return super().parse_args(ctx, list(translation.arguments))

    return Command


def _misspelt(arguments: Iterable[str], own: set[str], answers: Answers) -> Iterator[Problem]:
    """Options that are neither ours nor mergekit's, but almost mergekit's."""
    # Here and not above: it takes pydantic, which the help does without.
    from raymerge.documents.fields import closest

    for word in takewhile(lambda word: word != "--", arguments):
        name = word.partition("=")[0]
        if name.startswith("--") and name != "--help" and name not in own:
            guess = closest(name, [*own, *answers], cutoff=0.8)
            if guess in answers:
                yield Problem(name, "there is no such option.", f"Did you mean '{guess}'?")


@dataclass(frozen=True, slots=True)
class Former:
    """What a command of mergekit is called here."""

    verb: str
    answers: Answers = field(default_factory=dict)
    """For options that the verb does not accept itself."""
    positions: tuple[str, ...] = ()
    """Options that stand before its arguments, one by one."""
    placeholders: tuple[str, ...] = ("RECIPE", "-o", "OUT")
    """For who gives no arguments."""


_FORMER: Mapping[str, Former] = MappingProxyType(
    {
        **dict.fromkeys(("yaml", "merge", "run", "moe", "multi", "pytorch"), Former("submit")),
        "extract-lora": Former("extract-lora", placeholders=("MODEL", "--base", "BASE", "-o", "OUT")),
        "tokensurgeon": Former(
            "transplant", TRANSPLANT, ("", "--tokenizer", "-o"), ("MODEL", "DONOR", "OUT")
        ),
    }
)
_WITHOUT: Mapping[str, str] = MappingProxyType(
    {
        "evolve": "Nothing here searches for parameters; each set of them is a recipe for: raymerge submit",
        "legacy": "Write a recipe, which has the method, weights and densities, for: raymerge submit",
        "bakllama": "Write a recipe with 'slices' and merge_method: passthrough, for: raymerge submit",
        "layershuffle": "Write a recipe with one slice for each layer, for: raymerge submit",
    }
)


class Verbs(TyperGroup):
    """The commands; who types one of mergekit's, or a recipe alone, is told what to type here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args[0] not in self.commands and (remedy := _advice(args)):
            raise OptionError(Problem(f"raymerge {args[0]}", "there is no such command.", remedy))
        return super().resolve_command(ctx, args)


def _advice(arguments: Sequence[str]) -> str:
    name = arguments[0].removeprefix("mergekit-")
    if name in _WITHOUT:
        return f"{_WITHOUT[name]} RECIPE -o OUT ({PAGE})."
    if name.lower().endswith((".yml", ".yaml")) or os.path.isfile(arguments[0]):
        return f"A recipe is merged by:\n{_command(Former('submit'), arguments)}"
    if (former := _FORMER.get(name)) is None:
        return ""
    placeholders = former.placeholders if all(map(_OPTION.match, arguments[1:])) else ()
    return f"Type:\n{_command(former, [*placeholders, *arguments[1:]])}"


def _command(former: Former, arguments: Sequence[str]) -> str:
    before, words = iter(former.positions), ["raymerge", former.verb]
    for word, answer, value in _options(arguments, former.answers):
        if answer is None:
            words += [next(before, ""), word]
        else:
            words += answer.filled(value)
    return shlex.join(filter(None, words))
