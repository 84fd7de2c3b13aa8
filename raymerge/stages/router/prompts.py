"""Prompts as tokens: each a sequence by itself, never padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.sections import config_int
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.source import ExpertPrompts, GateSpec, Source
from raymerge.storage.temporary import fetched

MOST_TOKENS = 512
"""Tokens of one piece of a prompt file, the one that begins it included."""
FEWEST_TOKENS = 16
"""Tokens of its own that the last of several pieces of a prompt file must have to be worth reading."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
# What configs call the number of tokens that the model reads at once.


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A sequence of tokens that is read by itself."""

    expert: int
    """Whose prompt it is: the number of the expert, routed ones first, then shared ones."""
    sign: int
    """1 for a positive prompt, -1 for a negative one, 0 for a text that only the report uses."""
    tokens: tuple[int, ...]


def tokenized(spec: GateSpec) -> tuple[TokenRun, ...]:
    """The prompts of all experts, expert by expert, as tokens of the base model.

    A prompt is the tokenizer's text for the beginning of a sequence, where it has one, and the prompt itself;
    the tokenizer adds nothing. A prompt file is cut into pieces that each begin so.

    Raises:
        PlanError: the base has no tokenizer that can be loaded from its files, or prompts cannot be used; all
            of them at once.
    """
    tokenizing = _Tokenizing(spec.base, _load_tokenizer(spec.base))
    runs = [
        run
        for expert, prompts in enumerate((*spec.experts, *spec.shared))
        for run in tokenizing.runs(expert, prompts)
    ]
    if tokenizing.problems:
        raise PlanError(tokenizing.problems)
    return tuple(runs)


class _Tokenizing:
    """One base model's way with texts, and what was wrong with them so far."""

    def __init__(self, base: Source, tokenizer: Any) -> None:
        self.problems: list[Problem] = []
        self._base = base
        self._tokenizer = tokenizer
        self._begin_text: str = tokenizer.bos_token or ""
        self._begin = self._ids(self._begin_text)
        self._most = config_int(base.checkpoint.config, _POSITIONS)
        pair = base.pair
        self._rows = base.checkpoint.tensors[pair.embedding].shape[0] if pair is not None else None

    def runs(self, expert: int, prompts: ExpertPrompts) -> Iterator[TokenRun]:
        """The runs of one expert: positive prompts, its file, negative prompts, and what is held out."""
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
        where = f"{name}: the prompt {_short(text)}"
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
        """Whether the embedding has a row for each token."""
        if self._rows is None or max(tokens) < self._rows:
            return True
        what = f"has the token {max(tokens)}, and the embedding of {self._base.name} has {self._rows} rows."
        self.problems.append(Problem(where, what, "Give the base model the tokenizer that belongs to it."))
        return False

    def _ids(self, text: str) -> list[int]:
        # Not verbose: a long text is meant to be cut.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _load_tokenizer(base: Source) -> Any:
    """The tokenizer in the base's own directory; code that comes with the model is not run."""
    # Slow to import, and only wanted where there are prompts.
    from transformers import AutoTokenizer

    try:
        with fetched(base.checkpoint.root, (*base.checkpoint.companions, CONFIG_FILE)) as directory:
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what it raises depends on the class, the files and the libraries installed
        reason = " ".join(str(error).split())[:160]
        what = f"transformers cannot load its tokenizer, which the prompts need ({reason})."
        remedy = "Put the tokenizer's files beside its config.json, or use gate_mode: random."
        raise PlanError(Problem(base.name, what, remedy)) from error


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
