"""Load: transformers takes the checkpoint with strict keys, and, where it fits the memory, runs it.

Names and shapes are compared on the meta device, as loading would map them, for a model of any size. If
the weights fit the memory they are loaded as users load them, the logits of a few tokens must be finite, and
a few more are generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from raymerge.architectures import NameReader, Role, load_rules, stacks
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.errors import Problem, UserError, VerificationError
from raymerge.units import format_size
from raymerge.verifier.meta_model import (
    MXFP4,
    Fit,
    MetaModel,
    NotLoadableError,
    build_meta_model,
    fit_tensors,
    needs_own_code,
    quiet,
    reason,
)

_NAMES_SHOWN = 3
_NEW_TOKENS = 8
_NUM_PROMPT_TOKENS = 4
_PROMPT = "The capital of France is"
_COPIES = 3
"""Times that the largest parameter may be in memory while it is put together."""
_OVERHEAD_NBYTES = 256 << 20
"""Room for states and temporaries of a run of a few tokens."""
_ELSEWHERE = "Use --level audit, which needs no transformers."


@dataclass(frozen=True, slots=True)
class Passed:
    """Tensors or keys that are left out of the comparison, for one reason."""

    why: str
    """The reason."""
    names: tuple[str, ...]
    """Their names in the model."""


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """What was found; ``problems`` empty means that it loads."""

    path: str
    """The checkpoint."""
    transformers: str
    """Version of transformers."""
    model_class: str
    """The class that was built; "" where none was."""
    tensors: int
    """Stored tensors."""
    keys: int
    """Keys of the model that are loaded."""
    passed: tuple[Passed, ...]
    """What is not compared, though it is there or wanted."""
    needed_nbytes: int
    """Bytes of memory that loading and running the weights takes."""
    ran: bool
    """Whether the weights were loaded and the model was run, not only names and shapes compared."""
    tokens: tuple[int, ...]
    """Tokens that were generated."""
    note: str
    """Why not all was done; "" where it was."""
    problems: tuple[Problem, ...]
    """What is wrong."""

    def require(self) -> LoadVerdict:
        """This verdict, if nothing is wrong.

        Raises:
            VerificationError: with every problem.
        """
        if self.problems:
            raise VerificationError(self.problems)
        return self


def load_checkpoint(
    root: Path, *, memory: int, trust_remote_code: bool = False, name: str = "", lack: str = ""
) -> LoadVerdict:
    """Verify that transformers loads a checkpoint. Never raises for what is wrong: the verdict says it.

    Args:
        root: its directory.
        memory: bytes that its weights may take; larger models are compared by names and shapes alone.
        trust_remote_code: whether Python files of the checkpoint may be run, where transformers does not
            know its model.
        name: what messages call it; "" for its directory.
        lack: why its weights are not there, but their headers alone; "" where they are.
    """
    found = _Findings(name or str(root))
    try:
        checkpoint = open_checkpoint(root, found.name)
        found.tensors = len(checkpoint.tensors)
        if checkpoint.is_raw:
            raise NotLoadableError("it has no config.json: it is tensors without a model")
        with quiet():
            _compare(found, checkpoint, trust_remote_code=trust_remote_code)
            if not found.problems:
                own_code = trust_remote_code and bool(needs_own_code(checkpoint))
                if lack:
                    found.note = f"only names and shapes were compared: {lack}"
                else:
                    _load_and_run(found, checkpoint, memory, own_code=own_code)
    except UserError as error:
        found.problems += error.problems
    except NotLoadableError as error:
        found.problems.append(_not_loadable(found.name, error))
    return found.verdict()


class _Findings:
    """What is found on the way to a verdict."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model_class = self.note = ""
        self.tensors = self.keys = self.needed_nbytes = 0
        self.passed: list[Passed] = []
        self.ran = False
        self.tokens: tuple[int, ...] = ()
        self.problems: list[Problem] = []

    def verdict(self) -> LoadVerdict:
        """All of it."""
        return LoadVerdict(
            path=self.name,
            transformers=version("transformers"),
            model_class=self.model_class,
            tensors=self.tensors,
            keys=self.keys,
            passed=tuple(self.passed),
            needed_nbytes=self.needed_nbytes,
            ran=self.ran,
            tokens=self.tokens,
            note=self.note,
            problems=tuple(self.problems),
        )


def _compare(found: _Findings, checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Names and shapes on the meta device."""
    meta = build_meta_model(checkpoint, trust_remote_code=trust_remote_code)
    found.model_class = meta.class_name
    found.keys = len(meta.model.state_dict())
    found.needed_nbytes = _needed(meta)
    fit = fit_tensors(meta, checkpoint.tensors)
    extra = _extra_predictors(checkpoint, fit.unexpected)
    groups = (
        ("tensors that its class passes over", fit.passed_over),
        ("tensors of layers that predict further tokens, which transformers does not build", extra),
        ("keys that share the tensor of another", fit.tied),
        ("keys that transformers makes itself", fit.made_anew),
    )
    found.passed += [Passed(why, names) for why, names in groups if names]
    found.problems += _problems(
        checkpoint.name, meta.class_name, fit, unexpected=_without(fit.unexpected, extra)
    )


def _needed(meta: MetaModel) -> int:
    return meta.nbytes + _COPIES * meta.largest_nbytes + _OVERHEAD_NBYTES


def _extra_predictors(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[str, ...]:
    """Which tensors belong to layers of multi-token prediction, by their names."""
    if not names:
        return ()
    rules = load_rules(str(checkpoint.config.get("model_type") or "") or None)
    found = stacks(checkpoint.tensors, checkpoint.config)
    reader = NameReader(rules, stacks=found)
    return tuple(name for name in names if reader.describe(name).role is Role.MTP)


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    left_out = set(others)
    return [name for name in names if name not in left_out]


def _problems(where: str, model: str, fit: Fit, *, unexpected: Sequence[str]) -> Iterator[Problem]:
    again = "Merge again, or mend config.json: they are not of one model."
    if fit.missing:
        what = f"{_some(fit.missing)} of {model} would be random: the checkpoint has no tensor for it."
        yield Problem(where, what, again)
    if unexpected:
        yield Problem(where, f"{_some(unexpected)} would be left out: {model} has no place for it.", again)
    if fit.mismatched:
        key, has, wants = fit.mismatched[0]
        many = _some([name for name, _, _ in fit.mismatched])
        what = f"{many} has another shape than {model} has: {key} is {list(has)} and not {list(wants)}."
        yield Problem(where, what, again)
    if fit.failed:
        key, text = fit.failed[0]
        what = f"{_some([name for name, _ in fit.failed])} cannot be put together of its tensors ({text})."
        yield Problem(where, what, again)


def _some(names: Sequence[str]) -> str:
    """``a``, or ``a, b and 40 more``."""
    shown, rest = ", ".join(names[:_NAMES_SHOWN]), len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _load_and_run(found: _Findings, checkpoint: Checkpoint, memory: int, *, own_code: bool) -> None:
    """Load the weights as users do and run the model, or note why not."""
    if found.needed_nbytes > memory:
        found.note = (
            "only names and shapes were compared: loading takes "
            f"{format_size(found.needed_nbytes)} of memory and may take {format_size(memory)}"
        )
        return
    try:
        model = _loaded(checkpoint, found.model_class, own_code=own_code)
    except ImportError as error:
        found.note = f"only names and shapes were compared: loading needs a package ({reason(error)})"
        return
    except (Exception, SystemExit) as error:  # what loading raises is the library's, or a model's own
        what = f"transformers cannot load it ({reason(error)})."
        found.problems.append(Problem(checkpoint.name, what, _ELSEWHERE))
        return
    with torch.inference_mode():
        found.problems += _run(found, model, checkpoint, own_code=own_code)


def _loaded(checkpoint: Checkpoint, name: str, *, own_code: bool) -> Any:
    """The model with its weights, on the CPU."""
    import transformers

    library: Any = transformers
    architecture = getattr(library, name, None) or library.AutoModelForCausalLM
    # Said in any case: where it is left out, transformers asks on the terminal.
    options: dict[str, Any] = {"trust_remote_code": own_code}
    if dict(checkpoint.config.get("quantization_config") or {}).get("quant_method") == MXFP4:
        options["quantization_config"] = library.Mxfp4Config(dequantize=True)
    return architecture.from_pretrained(checkpoint.root, local_files_only=True, dtype="auto", **options)


def _run(found: _Findings, model: Any, checkpoint: Checkpoint, *, own_code: bool) -> Iterator[Problem]:
    """Logits of a few tokens, and, where the model writes text, a few more tokens that follow."""
    if model.main_input_name != "input_ids":
        found.note = f"the weights were loaded; {found.model_class} reads no text first, so it was not run"
        return
    try:
        tokens = _prompt(checkpoint, model, own_code=own_code)
    except (Exception, SystemExit) as error:  # as above; it may want a package or code that is not run
        tokens = _any_tokens(model)
        found.note = f"its tokenizer does not load here ({reason(error)}), so any tokens were put in"
    prompt = torch.tensor([tokens])
    try:
        found.tokens, logits = _answer(model, prompt)
    except (Exception, SystemExit) as error:  # as above
        yield Problem(checkpoint.name, f"it loads and cannot be run ({reason(error)}).", _ELSEWHERE)
        return
    found.ran = True
    if not all(bool(torch.isfinite(each).all()) for each in logits):
        what = "it loads, and what it answers to a few tokens has NaN or infinity."
        yield Problem(
            checkpoint.name, what, "Run the parents: one of them may do the same, or a weight is off."
        )


def _answer(model: Any, prompt: torch.Tensor) -> tuple[tuple[int, ...], Sequence[torch.Tensor]]:
    """The tokens that follow, none for a model that writes none, and logits or states."""
    mask = torch.ones_like(prompt)
    if not model.can_generate():
        return (), [model(input_ids=prompt, attention_mask=mask, return_dict=False)[0]]
    made = model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return tuple(made.sequences[0, -len(made.logits) :].tolist()), made.logits


def _prompt(checkpoint: Checkpoint, model: Any, *, own_code: bool) -> Sequence[int]:
    """A few tokens: of a sentence where there is a tokenizer, else the first of the vocabulary."""
    if not any("token" in key or key.startswith("vocab") for key in checkpoint.companions):
        return _any_tokens(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        checkpoint.root, local_files_only=True, trust_remote_code=own_code
    )
    tokens = list(tokenizer(_PROMPT)["input_ids"])
    return tokens if tokens and max(tokens) < _vocabulary(model) else _any_tokens(model)


def _any_tokens(model: Any) -> list[int]:
    size = _vocabulary(model)
    return [min(number, size - 1) for number in range(1, _NUM_PROMPT_TOKENS + 1)]


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _not_loadable(name: str, error: NotLoadableError) -> Problem:
    return Problem(name, f"it is not loadable here: {error}.", _not_loadable_remedy(str(error)))


def _not_loadable_remedy(text: str) -> str:
    if "auto_map" in text:
        return f"Read its code and give --trust-remote-code to run it. {_ELSEWHERE}"
    return f"Install a transformers, or the package, that it needs. {_ELSEWHERE}"
