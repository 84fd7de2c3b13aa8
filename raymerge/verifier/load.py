"""Load: transformers takes the checkpoint with strict keys, and, if it fits the memory, runs it; of a remote
one a local copy.

Names and shapes are compared on the meta device, for a model of any size, by transformers' own classes,
conversions of experts, ties and quantisers. If the weights fit the memory they are loaded as users do, the
logits of a few tokens must be finite, and a few more are generated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from logging import CRITICAL
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from raymerge.architectures.roles import NameReader, stacks
from raymerge.architectures.rules import Role, class_names, rules_of
from raymerge.checkpoints.files import INDEX_FILE, PICKLES
from raymerge.checkpoints.header import StoredTensor, read_header
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint, WeightFile, open_checkpoint
from raymerge.deferred import torch
from raymerge.errors import OptionError, Problem, UserError, VerificationError, shortlist
from raymerge.merge_plan.elements import torch_dtype
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.local.store import write_fully
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore
from raymerge.storage.temporary import OwnDirectory, fetched
from raymerge.units import format_size

MXFP4 = "mxfp4"
"""gpt-oss's ``quant_method``; its codes are used directly on GPUs and decoded elsewhere."""
_DECODED_NBYTES = 2
"""Quantisers that decode on a CPU do so to bfloat16."""
_REASON_LENGTH = 300


class NotLoadableError(Exception):
    """No model can be built to load the checkpoint into; the text says why."""


@contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    theirs: Any = logging
    level, had_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if had_bars:
            theirs.enable_progress_bar()


def _meta_model(checkpoint: Checkpoint, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model of a checkpoint's config, on the meta device, and the decoder of its codes, None for
    plain models. Raises NotLoadableError if transformers has no such model, or cannot build it here."""
    from transformers import AutoConfig

    own_code = needs_own_code(checkpoint)
    if own_code and not trust_remote_code:
        raise NotLoadableError(f"{own_code}, and its own code (auto_map) is not run")
    try:
        with fetched(checkpoint.root, (*checkpoint.companions, CONFIG_FILE)) as directory:
            config: Any = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=bool(own_code)
            )
        quantizer = _quantizer(config)
        with torch.device("meta"):
            model = _built(checkpoint, config, own_code=bool(own_code))
        if quantizer is not None:
            _prepare(quantizer, model)
    except NotLoadableError:
        raise
    except (Exception, SystemExit) as error:  # what configs, classes and quantisers raise is theirs
        raise NotLoadableError(reason(error)) from error
    return model, quantizer


class _Fit(NamedTuple):
    info: Any
    """transformers' report: keys without a tensor, tensors without a key, other shapes, failed fusions."""
    tied: set[str]
    """Keys that share another's tensor."""
    passed_over: set[str]
    """Tensors without a key that the model's class ignores."""
    made_anew: set[str]
    """Keys without a tensor that the model's class initialises."""


def _fit_tensors(model: Any, quantizer: Any, tensors: Mapping[str, StoredTensor]) -> _Fit:
    """Load tensors without numbers into the model, which is unusable afterwards. Raises NotLoadableError if
    transformers' loading fails as a whole."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    conversions: Any = get_model_conversion_mapping(model, None, quantizer)
    try:
        info, _ = convert_and_load_state_dict_in_model(
            model,
            {
                name: torch.empty(each.shape, dtype=torch_dtype(each.dtype), device="meta")
                for name, each in tensors.items()
            },
            LoadStateDictConfig(
                device_map={"": "meta"},
                dtype=model.dtype,
                dtype_plan=model._get_dtype_plan(model.dtype),
                hf_quantizer=quantizer,
                weight_mapping=conversions,
            ),
        )
        absent = set(info.missing_keys)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        missing, unexpected = set(info.missing_keys), set(info.unexpected_keys)
        model._adjust_missing_and_unexpected_keys(info)
    except (Exception, SystemExit) as error:  # as above
        raise NotLoadableError(reason(error)) from error
    return _Fit(info, absent - missing, unexpected - info.unexpected_keys, missing - info.missing_keys)


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_on_one_line(str(error))}"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:_REASON_LENGTH]


def needs_own_code(checkpoint: Checkpoint) -> str:
    """Why only code of the checkpoint can build its model; "" where transformers knows the model. Raises
    NotLoadableError if nothing can build it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(checkpoint.config.get("model_type") or "")
    if kind in CONFIG_MAPPING:
        return ""
    kind_named = f"its config says model_type '{kind}'" if kind else "its config has no model_type"
    unknown = f"{kind_named}, which the installed transformers does not know"
    if not checkpoint.config.get("auto_map"):
        raise NotLoadableError(unknown)
    return unknown


def _quantizer(config: Any) -> Any:
    """The decoder of the checkpoint's codes, or None.

    Skips its check of the machine: missing kernels do not affect names and shapes."""
    from transformers.quantizers import auto

    quantizers: Any = auto.AutoHfQuantizer
    text = config.get_text_config(decoder=True)
    table = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if table is None or not quantizers.supports_quant_method(table):
        return None
    quantizer = quantizers.from_config(table, pre_quantized=True)
    config.quantization_config = quantizer.quantization_config
    return quantizer


def _prepare(quantizer: Any, model: Any) -> None:
    if quantizer.quantization_config.quant_method == MXFP4:
        # Its modules are made for kernels, which rearrange the numbers; decoded ones have plain shapes.
        quantizer.quantization_config.dequantize = True
    quantizer.preprocess_model(
        model=model, dtype=model.dtype, device_map=None, checkpoint_files=None, use_kernels=False
    )


def _built(checkpoint: Checkpoint, config: Any, *, own_code: bool) -> Any:
    import transformers

    library: Any = transformers
    names = class_names(checkpoint.config)
    if not own_code:
        for name in names:
            architecture: Any = getattr(library, name, None)
            if hasattr(architecture, "_from_config"):
                return architecture._from_config(config)
    for auto in (library.AutoModelForCausalLM, library.AutoModel):
        if own_code and auto.__name__ not in (checkpoint.config.get("auto_map") or {}):
            continue
        if own_code or type(config) in auto._model_mapping:
            return auto.from_config(config, trust_remote_code=own_code)
    named = f"the class {', '.join(names)}" if names else "a class for its config"
    raise NotLoadableError(f"the installed transformers does not have {named}")


_NEW_TOKENS = 8
_NUM_PROMPT_TOKENS = 4
_PROMPT = "The capital of France is"
_COPIES = 3
"""Copies of the largest parameter in memory while it is fused."""
_OVERHEAD_NBYTES = 256 << 20
"""Memory for states and temporaries of a run of a few tokens."""
_ELSEWHERE = "Use --level audit, which needs no transformers."


@dataclass(frozen=True, slots=True)
class Passed:
    why: str
    names: tuple[str, ...]


@dataclass(slots=True)
class LoadVerdict:
    """Empty ``problems`` mean that it loads."""

    path: str
    transformers: str
    model_class: str = ""
    tensors: int = 0
    keys: int = 0
    passed: tuple[Passed, ...] = ()
    needed_nbytes: int = 0
    """Memory for loading and running the weights."""
    ran: bool = False
    """Whether the weights were loaded and run, beyond comparing names and shapes."""
    tokens: tuple[int, ...] = ()
    note: str = ""
    """Why checks were skipped; "" where none were."""
    problems: tuple[Problem, ...] = ()

    def require(self) -> LoadVerdict:
        if self.problems:
            raise VerificationError(self.problems)
        return self


def load_checkpoint(
    root: Path, *, memory: int, trust_remote_code: bool = False, name: str = "", lack: str = ""
) -> LoadVerdict:
    """Verify that transformers loads a checkpoint. Problems are in the verdict, never raised.

    Models above ``memory`` bytes are compared by names and shapes alone, as are those with headers only,
    where ``lack`` says why there are no weights."""
    verdict = LoadVerdict(name or str(root), version("transformers"))
    try:
        checkpoint = open_checkpoint(root, verdict.path)
        verdict.tensors = len(checkpoint.model_tensors)
        if checkpoint.is_raw:
            raise NotLoadableError("it has no config.json: it is tensors without a model")
        with quiet():
            _compare(verdict, checkpoint, trust_remote_code=trust_remote_code)
            if not verdict.problems:
                own_code = trust_remote_code and bool(needs_own_code(checkpoint))
                if lack:
                    verdict.note = f"only names and shapes were compared: {lack}"
                else:
                    _load_and_run(verdict, checkpoint, memory, own_code=own_code)
    except UserError as error:
        verdict.problems += error.problems
    except NotLoadableError as error:
        remedy = f"Install a transformers, or the package, that it needs. {_ELSEWHERE}"
        if "auto_map" in str(error):
            remedy = f"Read its code and give --trust-remote-code to run it. {_ELSEWHERE}"
        verdict.problems = (Problem(verdict.path, f"it is not loadable here: {error}.", remedy),)
    return verdict


def _compare(verdict: LoadVerdict, checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    model, quantizer = _meta_model(checkpoint, trust_remote_code=trust_remote_code)
    verdict.model_class, verdict.keys = type(model).__name__, len(model.state_dict())
    least = 0 if quantizer is None else _DECODED_NBYTES
    sizes = [prod(each.shape) * max(each.element_size(), least) for each in model.parameters()]
    verdict.needed_nbytes = sum(sizes) + _COPIES * max(sizes, default=0) + _OVERHEAD_NBYTES
    fit = _fit_tensors(model, quantizer, checkpoint.model_tensors)
    extra = _extra_predictors(checkpoint, fit.info.unexpected_keys)
    groups = (
        ("tensors that its class passes over", fit.passed_over),
        ("tensors of layers that predict further tokens, which transformers does not build", extra),
        ("keys that share the tensor of another", fit.tied),
        ("keys that transformers makes itself", fit.made_anew),
    )
    verdict.passed = tuple(Passed(why, tuple(sorted(names))) for why, names in groups if names)
    again = "Merge again, or mend config.json: they are not of one model."
    faults = _faults(verdict.model_class, fit.info, extra)
    verdict.problems += tuple(Problem(checkpoint.name, what, again) for what in faults)


def _extra_predictors(checkpoint: Checkpoint, names: set[str]) -> set[str]:
    if not names:
        return set()
    all_stacks = stacks(checkpoint.model_tensors, checkpoint.config)
    reader = NameReader(rules_of(checkpoint.config), stacks=all_stacks)
    return {name for name in names if reader.describe(name).role is Role.MTP}


def _faults(model: str, info: Any, extra: set[str]) -> Iterator[str]:
    # The error and its place are the last two lines of transformers' report, behind a traceback.
    failed = {
        key: _on_one_line("\n".join(str(text).splitlines()[-2:]))
        for key, text in sorted(info.conversion_errors.items())
    }
    if missing := sorted(info.missing_keys - failed.keys()):
        yield f"{shortlist(missing)} of {model} would be random: the checkpoint has no tensor for it."
    if unexpected := sorted(info.unexpected_keys - extra):
        yield f"{shortlist(unexpected)} would be left out: {model} has no place for it."
    if mismatched := sorted((key, list(has), list(wants)) for key, has, wants in info.mismatched_keys):
        key, has, wants = mismatched[0]
        many = shortlist([name for name, _, _ in mismatched])
        yield f"{many} has another shape than {model} has: {key} is {has} and not {wants}."
    if failed:
        text = next(iter(failed.values()))
        yield f"{shortlist(failed)} cannot be put together of its tensors ({text})."


def _load_and_run(verdict: LoadVerdict, checkpoint: Checkpoint, memory: int, *, own_code: bool) -> None:
    if verdict.needed_nbytes > memory:
        verdict.note = (
            "only names and shapes were compared: loading takes "
            f"{format_size(verdict.needed_nbytes)} of memory and may take {format_size(memory)}"
        )
        return
    try:
        model = _loaded(checkpoint, verdict.model_class, own_code=own_code)
    except ImportError as error:
        verdict.note = f"only names and shapes were compared: loading needs a package ({reason(error)})"
        return
    except (Exception, SystemExit) as error:  # what loading raises is the library's, or a model's own
        what = f"transformers cannot load it ({reason(error)})."
        verdict.problems = (Problem(checkpoint.name, what, _ELSEWHERE),)
        return
    with torch.inference_mode():
        verdict.problems = tuple(_run(verdict, model, checkpoint, own_code=own_code))


def _loaded(checkpoint: Checkpoint, name: str, *, own_code: bool) -> Any:
    import transformers

    library: Any = transformers
    architecture = getattr(library, name, None) or library.AutoModelForCausalLM
    # Said in any case: where it is left out, transformers asks on the terminal.
    options: dict[str, Any] = {"trust_remote_code": own_code}
    if dict(checkpoint.config.get("quantization_config") or {}).get("quant_method") == MXFP4:
        options["quantization_config"] = library.Mxfp4Config(dequantize=True)
    return architecture.from_pretrained(checkpoint.root, local_files_only=True, dtype="auto", **options)


def _run(verdict: LoadVerdict, model: Any, checkpoint: Checkpoint, *, own_code: bool) -> Iterator[Problem]:
    if model.main_input_name != "input_ids":
        verdict.note = (
            f"the weights were loaded; {verdict.model_class} reads no text first, so it was not run"
        )
        return
    try:
        tokens = _prompt(checkpoint, model, own_code=own_code)
    except (Exception, SystemExit) as error:  # as above; it may want a package or code that is not run
        tokens = _any_tokens(model)
        verdict.note = f"its tokenizer does not load here ({reason(error)}), so any tokens were put in"
    prompt = torch.tensor([tokens])
    try:
        verdict.tokens, logits = _answer(model, prompt)
    except (Exception, SystemExit) as error:  # as above
        yield Problem(checkpoint.name, f"it loads and cannot be run ({reason(error)}).", _ELSEWHERE)
        return
    verdict.ran = True
    if not all(bool(torch.isfinite(each).all()) for each in logits):
        what = "it loads, and what it answers to a few tokens has NaN or infinity."
        remedy = "Run the parents: one of them may do the same, or a weight is off."
        yield Problem(checkpoint.name, what, remedy)


def _answer(model: Any, prompt: torch.Tensor) -> tuple[tuple[int, ...], Sequence[torch.Tensor]]:
    """Generated tokens (none for other models), and logits or states."""
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
    """Tokens of a sentence if there is a tokenizer, else the first of the vocabulary."""
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


_PIECE = 16 << 20
_READERS = 4


@contextmanager
def copy_to_load(place: str, *, memory: int, scratch: str | None) -> Iterator[tuple[Path, str]]:
    """A checkpoint's directory: the place itself where it is local, else a temporary copy; and why that has
    headers alone and no weights, "" where it has weights.

    Weights are fetched where they fit into ``memory`` bytes and onto the disk; otherwise files have their
    full length and their headers alone. Raises CheckpointError if it cannot be read, OptionError if
    ``scratch`` cannot be written to."""
    if not is_remote(place):
        yield Path(parse_place(place).text), ""
        return
    checkpoint = open_checkpoint(place, shown(place), pickled=True)
    small = {CONFIG_FILE, INDEX_FILE, PICKLES.index, *checkpoint.companions}
    with _own_directory(scratch) as here, open_store(place) as store:
        with fetched(place, small) as directory:
            shutil.copytree(directory, here, dirs_exist_ok=True)
        lack = _lack(sum(file.nbytes for file in checkpoint.files), memory, here)
        for file in checkpoint.files:
            copy = _copy_header if lack else _copy_whole
            copy(store, file, here / file.key)
        yield here, lack


def _own_directory(scratch: str | None) -> OwnDirectory:
    try:
        return OwnDirectory(scratch)
    except OSError as error:
        what = f"nothing can be written there: {error.strerror}."
        raise OptionError(Problem(str(scratch or "--scratch"), what, "Choose another --scratch.")) from error


def _lack(nbytes: int, memory: int, here: Path) -> str:
    size, free = format_size(nbytes), shutil.disk_usage(here).free
    if nbytes > memory:
        return f"its weights have {size}, and loading may take {format_size(memory)} of memory"
    if nbytes > free:
        return f"a copy of its weights takes {size}, and {format_size(free)} are free for it (--scratch)"
    return ""


def _copy_header(store: ReadStore, file: WeightFile, path: Path) -> None:
    header = store.read(file.key, 0, read_header(store, file.key, file.nbytes, file.version).data_start)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header)
    os.truncate(path, file.nbytes)


def _copy_whole(store: ReadStore, file: WeightFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out, ThreadPoolExecutor(_READERS) as threads:

        def copy(begin: int) -> None:
            data = store.read(file.key, begin, min(_PIECE, file.nbytes - begin))
            write_fully(out.fileno(), begin, memoryview(data))

        out.truncate(file.nbytes)
        # Taken to the end, for what goes wrong in a thread to be raised here.
        list(threads.map(copy, range(0, file.nbytes, _PIECE)))
