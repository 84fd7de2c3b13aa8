"""The model that transformers builds of a config, without a number in memory, and how it would be loaded.

Loading is transformers' own: its classes, its conversions between experts that are stored one by one and
together, its ties, its quantisers. Only the tensors are on the meta device, which has shapes and no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from math import prod
from typing import Any

import torch

from raymerge.architectures.sections import class_names
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint
from raymerge.merge_plan.elements_part import torch_dtype
from raymerge.storage.fetched import fetched

MXFP4 = "mxfp4"
"""``quant_method`` of gpt-oss, whose codes are computed with on GPUs and decoded elsewhere."""
_META = torch.device("meta")
_DECODED_NBYTES = 2
"""Bytes of a number that was decoded: quantisers that decode on a CPU do so to bfloat16."""
_REASON_LENGTH = 300


class NotLoadableError(Exception):
    """There is no model here that the checkpoint could be loaded into; the text says why."""


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model on the meta device."""

    model: Any
    """The model, a ``PreTrainedModel``."""
    quantizer: Any
    """What makes numbers of its codes; None where it has none."""

    @property
    def class_name(self) -> str:
        """Name of its class."""
        return type(self.model).__name__

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its parameters take when they are loaded; of codes, when they are decoded."""
        return sum(self._nbytes(each) for each in self.model.parameters())

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest parameter, put together of several that are stored."""
        return max((self._nbytes(each) for each in self.model.parameters()), default=0)

    def _nbytes(self, parameter: torch.Tensor) -> int:
        size = parameter.element_size()
        return prod(parameter.shape) * (size if self.quantizer is None else max(size, _DECODED_NBYTES))


@dataclass(frozen=True, slots=True)
class Fit:
    """How tensors and a model's keys go together, by the names that the model has."""

    missing: tuple[str, ...]
    """Keys that have no tensor."""
    unexpected: tuple[str, ...]
    """Tensors that fill no key."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Keys whose tensor has another shape: key, shape found, shape expected."""
    failed: tuple[tuple[str, str], ...]
    """Keys of which tensors could not be put together, and the reason."""
    tied: tuple[str, ...]
    """Keys without a tensor of their own, since they share that of another."""
    passed_over: tuple[str, ...]
    """Tensors that fill no key, as the model's class expects."""
    made_anew: tuple[str, ...]
    """Keys that no tensor fills, as the model's class expects."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports of loading from the terminal: verdicts say it all."""
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


def build_meta_model(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> MetaModel:
    """The model of a checkpoint's config, on the meta device.

    Args:
        checkpoint: a local directory with a config.
        trust_remote_code: whether Python files of the checkpoint may be run, where transformers does not
            know its model.

    Raises:
        NotLoadableError: transformers has no such model, or cannot build it here.
    """
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
        with _META:
            model = _built(checkpoint, config, own_code=bool(own_code))
        if quantizer is not None:
            _prepare(quantizer, model)
    except NotLoadableError:
        raise
    except (Exception, SystemExit) as error:  # what configs, classes and quantisers raise is theirs
        raise NotLoadableError(reason(error)) from error
    return MetaModel(model, quantizer)


def fit_tensors(meta: MetaModel, tensors: Mapping[str, StoredTensor]) -> Fit:
    """Load tensors without numbers into the model, which is of no use afterwards.

    Raises:
        NotLoadableError: transformers' loading fails as a whole.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model, dtype = meta.model, meta.model.dtype
    conversions: Any = get_model_conversion_mapping(model, None, meta.quantizer)
    try:
        info, _ = convert_and_load_state_dict_in_model(
            model,
            {name: _empty(tensor) for name, tensor in tensors.items()},
            LoadStateDictConfig(
                device_map={"": "meta"},
                dtype=dtype,
                dtype_plan=model._get_dtype_plan(dtype),
                hf_quantizer=meta.quantizer,
                weight_mapping=conversions,
            ),
        )
        absent = set(info.missing_keys)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        missing, unexpected = set(info.missing_keys), set(info.unexpected_keys)
        model._adjust_missing_and_unexpected_keys(info)
    except (Exception, SystemExit) as error:  # as above
        raise NotLoadableError(reason(error)) from error
    shapes = ((key, tuple(found), tuple(wanted)) for key, found, wanted in info.mismatched_keys)
    failed = {key: _last_lines(text) for key, text in info.conversion_errors.items()}
    return Fit(
        missing=tuple(sorted(info.missing_keys - failed.keys())),
        unexpected=tuple(sorted(info.unexpected_keys)),
        mismatched=tuple(sorted(shapes)),
        failed=tuple(sorted(failed.items())),
        tied=tuple(sorted(absent - missing)),
        passed_over=tuple(sorted(unexpected - info.unexpected_keys)),
        made_anew=tuple(sorted(missing - info.missing_keys)),
    )


def reason(error: BaseException) -> str:
    """An error of a library as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_REASON_LENGTH]}"


def _last_lines(text: Any) -> str:
    """What a report of transformers ends with: the error, and where. Before that stands a traceback."""
    return " ".join(" ".join(str(text).splitlines()[-2:]).split())[:_REASON_LENGTH]


def needs_own_code(checkpoint: Checkpoint) -> str:
    """Why only code of the checkpoint can build its model; "" where transformers knows the model.

    Raises:
        NotLoadableError: nothing can build it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(checkpoint.config.get("model_type") or "")
    if kind in CONFIG_MAPPING:
        return ""
    said = f"its config says model_type '{kind}'" if kind else "its config has no model_type"
    unknown = f"{said}, which the installed transformers does not know"
    if not checkpoint.config.get("auto_map"):
        raise NotLoadableError(unknown)
    return unknown


def _quantizer(config: Any) -> Any:
    """What makes numbers of the checkpoint's codes, or None.

    Its own check of the machine is left out: whether kernels are there says nothing of names and shapes.
    """
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
    """Put the modules of codes in their places."""
    if quantizer.quantization_config.quant_method == MXFP4:
        # Its modules are made for kernels, which rearrange the numbers; decoded ones have plain shapes.
        quantizer.quantization_config.dequantize = True
    quantizer.preprocess_model(
        model=model, dtype=model.dtype, device_map=None, checkpoint_files=None, use_kernels=False
    )


def _built(checkpoint: Checkpoint, config: Any, *, own_code: bool) -> Any:
    """The class that the config names; where transformers has none of the name, its usual one of the kind."""
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


def _empty(tensor: StoredTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device=_META)
