"""Prompts as tokens, each its own unpadded sequence; and the schedule in which the base model reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymerge.deferred import torch
from raymerge.errors import PlanError, Problem
from raymerge.planner.calibration import most_positions
from raymerge.planner.inputs.sources import ExpertPrompts, GateSpec, Source
from raymerge.stages.texts import load_tokenizer, token_ids

MOST_TOKENS = 512
"""Tokens of one piece of a prompt file, its start token included."""
FEWEST_TOKENS = 16
"""Fewest own tokens for the last of several pieces of a prompt file; a shorter one is dropped."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    expert: int
    """Number of the expert, routed ones first, then shared ones."""
    sign: int
    """1 for a positive prompt, -1 for a negative one, 0 for a text that only the report uses."""
    tokens: tuple[int, ...]


def tokenized(spec: GateSpec) -> tuple[TokenRun, ...]:
    """The prompts of all experts, expert by expert, as tokens of the base model.

    A prompt is the tokenizer's start-of-sequence text, if it has one, and the prompt itself; the tokenizer
    adds nothing. A prompt file is cut into pieces that each start so.

    Raises PlanError: the base has no tokenizer that can be loaded from its files, or some prompts are
    unusable."""
    tokenizing = _Tokenizing(spec.base, load_tokenizer(spec.base, instead="use gate_mode: random"))
    runs = [
        run
        for expert, prompts in enumerate((*spec.experts, *spec.shared))
        for run in tokenizing.runs(expert, prompts)
    ]
    if tokenizing.problems:
        raise PlanError(tokenizing.problems)
    return tuple(runs)


class _Tokenizing:
    def __init__(self, base: Source, tokenizer: Any) -> None:
        self.problems: list[Problem] = []
        self._base = base
        self._tokenizer = tokenizer
        self._begin_text: str = tokenizer.bos_token or ""
        self._begin = self._ids(self._begin_text)
        self._most = most_positions(base)
        pair = base.pair
        self._rows = base.checkpoint.tensors[pair.embedding].shape[0] if pair is not None else None

    def runs(self, expert: int, prompts: ExpertPrompts) -> Iterator[TokenRun]:
        for text in prompts.positive:
            yield from self._prompt(expert, 1, prompts.name, text)
        if prompts.text:
            yield from self._file(expert, prompts)
        for text in prompts.negative:
            yield from self._prompt(expert, -1, prompts.name, text)
        for text in prompts.held_out:
            yield from self._prompt(expert, 0, prompts.name, text)

    def _prompt(self, expert: int, sign: int, name: str, text: str) -> Iterator[TokenRun]:
        tokens = self._ids(self._begin_text + text)
        where = f"{name}: the prompt {text if len(text) <= 40 else f'{text[:37]}...'!r}"
        # An empty prompt is the beginning of a sequence alone, as in mergekit.
        if not tokens:
            what = f"gives no tokens in the tokenizer of {self._base.name}."
            self.problems.append(Problem(where, what, "Write a text, or remove the prompt."))
        elif self._most is not None and len(tokens) > self._most:
            what = f"is {len(tokens)} tokens long, and {self._base.name} reads {self._most} at once."
            remedy = (
                "Shorten it; router_input, centroid and ridge take a prompt_file, which is cut into pieces."
            )
            self.problems.append(Problem(where, what, remedy))
        elif self._is_known(where, tokens):
            yield TokenRun(expert, sign, tuple(tokens))

    def _file(self, expert: int, prompts: ExpertPrompts) -> Iterator[TokenRun]:
        tokens = self._ids(prompts.text)
        where = f"{prompts.name}: its prompt file"
        if not tokens:
            what = f"gives no tokens in the tokenizer of {self._base.name}."
            self.problems.append(Problem(where, what, "Name a file with text in it."))
        elif self._is_known(where, tokens):
            length = max(min(MOST_TOKENS, self._most or MOST_TOKENS) - len(self._begin), 1)
            for start in range(0, len(tokens), length):
                piece = tokens[start : start + length]
                if not start or len(piece) >= FEWEST_TOKENS:
                    yield TokenRun(expert, 1, (*self._begin, *piece))

    def _is_known(self, where: str, tokens: Sequence[int]) -> bool:
        if self._rows is None or max(tokens) < self._rows:
            return True
        what = f"has the token {max(tokens)}, and the embedding of {self._base.name} has {self._rows} rows."
        self.problems.append(Problem(where, what, "Give the base model the tokenizer that belongs to it."))
        return False

    def _ids(self, text: str) -> list[int]:
        return token_ids(self._tokenizer, text)


UNIT_TOKENS = 65_536
"""Most tokens of a unit, unless a single run has more. Fixed: the rows' last bits depend on it."""

NO_NEGATIVES = frozenset({"centroid", "ridge"})
"""Gate modes without negative texts."""

_KEPT_TOKENS = 256
_KEPT_IN_ALL = 8_192


class Use(NamedTuple):
    expert: int
    sign: int
    """1 for the expert, -1 against it."""
    first: int
    """Leading tokens that belong to the first half of the expert's positive texts; the others to the second.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    run: TokenRun
    """The tokens; of equal runs the first."""
    uses: tuple[Use, ...]
    kept: tuple[tuple[int, tuple[int, ...]], ...]
    """For the report: experts, each with the positions that it looks at."""


@dataclass(frozen=True, slots=True)
class Schedule:
    units: tuple[tuple[Reading, ...], ...]
    num_routed: int
    """Routed experts; shared ones follow them."""
    num_positive: tuple[int, ...]
    num_negative: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_first: tuple[int, ...]
    num_kept: tuple[int, ...]
    """Tokens of each routed expert that the report looks at."""
    on_own: tuple[int, ...]
    """Routed experts without held-out texts: the report uses the texts of their rows."""

    @property
    def num_experts(self) -> int:
        return len(self.num_positive)

    @property
    def shares(self) -> torch.Tensor:
        """The share of each routed expert's positive tokens that is in each half: float64 ``[2, E]``."""
        pairs = zip(self.num_first[: self.num_routed], self.num_tokens, strict=False)
        first = torch.tensor([part / max(count, 1) for part, count in pairs], dtype=torch.float64)
        return torch.stack([first, 1.0 - first])

    @property
    def longest(self) -> int:
        return max((len(each.run.tokens) for unit in self.units for each in unit), default=0)


def make_schedule(runs: Sequence[TokenRun], mode: str, *, num_routed: int, num_shared: int) -> Schedule:
    """Decide what is read, in which unit, and for what.

    Equal runs are read once. The report looks at 256 tokens of each routed expert, evenly taken (fewer above
    32 experts), of its held-out texts or else of its own."""
    signs = (1,) if mode in NO_NEGATIVES else (1, -1)
    held_out = {run.expert for run in runs if not run.sign}
    positions_of: dict[int, tuple[int, ...]] = {}
    for expert in range(num_routed):
        sign = 0 if expert in held_out else 1
        judged = [at for at, run in enumerate(runs) if (run.expert, run.sign) == (expert, sign)]
        positions_of |= zip(judged, _evenly([len(runs[at].tokens) for at in judged], num_routed), strict=True)
    experts = range(num_routed + num_shared)
    positive = [[run for run in runs if run.sign > 0 and run.expert == expert] for expert in experts]
    halves = [_first_half([run.tokens for run in each]) for each in positive]
    readings: dict[tuple[int, ...], Reading] = {}
    for at, run in enumerate(runs):
        first = halves[run.expert].get(run.tokens, 0) if run.sign > 0 else 0
        uses = (Use(run.expert, run.sign, first),) if run.sign in signs else ()
        looks = ((run.expert, positions_of[at]),) if positions_of.get(at) else ()
        if uses or looks:
            before = readings.get(run.tokens, Reading(run, (), ()))
            readings[run.tokens] = Reading(before.run, (*before.uses, *uses), (*before.kept, *looks))
    return Schedule(
        units=tuple(_units(readings.values())),
        num_routed=num_routed,
        num_positive=tuple(map(len, positive)),
        num_negative=tuple(sum(run.sign < 0 and run.expert == e for run in runs) for e in experts),
        num_tokens=tuple(sum(len(run.tokens) for run in each) for each in positive),
        num_first=tuple(
            sum(half[run.tokens] for run in each) for half, each in zip(halves, positive, strict=True)
        ),
        num_kept=tuple(
            sum(len(positions) for at, positions in positions_of.items() if runs[at].expert == expert)
            for expert in range(num_routed)
        ),
        on_own=tuple(expert for expert in range(num_routed) if expert not in held_out),
    )


def check_prompts(spec: GateSpec, runs: Sequence[TokenRun], *, where: str) -> None:
    """Raises PlanError: an expert has no text."""
    prompted = {run.expert for run in runs if run.sign > 0}
    problems = [
        Problem(
            where,
            f"{expert.name} has no positive_prompts and no prompt_file; gate_mode {spec.mode} needs text.",
            "Give it some, or write gate_mode: random.",
        )
        for number, expert in enumerate((*spec.experts, *spec.shared))
        if number not in prompted
    ]
    if problems:
        raise PlanError(problems)


def _first_half(texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """How many leading tokens of each of one expert's texts are in the first half.

    The longest texts go first, each to the half that has less, so that no text is in both. A single text is
    cut in two."""
    lengths = {text: len(text) * count for text, count in Counter(texts).items()}
    if len(lengths) == 1:
        return {text: len(text) // 2 for text in lengths}
    shared: dict[tuple[int, ...], int] = {}
    more_in_first = 0
    for text in sorted(lengths, key=lambda text: -lengths[text]):
        is_first = more_in_first <= 0
        shared[text] = len(text) if is_first else 0
        more_in_first += lengths[text] if is_first else -lengths[text]
    return shared


def _evenly(lengths: Sequence[int], num_routed: int) -> list[tuple[int, ...]]:
    """For each run of one expert the kept positions, evenly spaced over all of its tokens."""
    total = sum(lengths)
    count = min(total, _KEPT_TOKENS, max(1, _KEPT_IN_ALL // num_routed))
    targets = [(2 * number + 1) * total // (2 * count) for number in range(count)]
    portions, begin = [], 0
    for length in lengths:
        portions.append(tuple(at - begin for at in targets if begin <= at < begin + length))
        begin += length
    return portions


def _units(readings: Iterable[Reading]) -> Iterator[tuple[Reading, ...]]:
    current: list[Reading] = []
    filled = 0
    for reading in readings:
        length = len(reading.run.tokens)
        if current and filled + length > UNIT_TOKENS:
            yield tuple(current)
            current, filled = [], 0
        current.append(reading)
        filled += length
    if current:
        yield tuple(current)
