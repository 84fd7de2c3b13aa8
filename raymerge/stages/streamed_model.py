"""A model with one layer in memory at a time, and the parts before the first.

Every batch of tokens goes through a layer before the next layer is read, so that the model may be larger
than memory. Its sequences are of one length, without padding or mask, and independent of each other.

The arithmetic is that of transformers' own modules, so every family of decoders works as it does there.

Codes with scales are decoded to float32 when a layer is loaded. Where logits are asked for, the head comes
after the layers, some of its rows at a time.

The model is made on the meta device. Module names give its parts and the tensors of each parameter: one
tensor of the checkpoint by the same name, or many experts' matrices stacked. The arguments of layer calls are
found by calling the model with layers that only record them."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from os.path import commonpath
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from raymerge.architectures.expert_fields import expert_fields
from raymerge.architectures.roles import describe, fused_layout, logical_name, logical_names
from raymerge.architectures.rules import Role, class_names
from raymerge.checkpoints.views import View, fused_views
from raymerge.deferred import torch
from raymerge.device_numerics import return_free_memory
from raymerge.errors import NonFiniteError, PlanError, Problem, shortlist
from raymerge.merge_plan.elements import strided
from raymerge.planner.inputs.quantised import USE_PLAIN, quantised_tensors
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.storage.local.store import LocalStore

_PLAIN = (type(None), bool, int, float, str)


class Shape(NamedTuple):
    """Of a batch of sequences of tokens."""

    batch: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class Call:
    hidden: torch.Tensor
    """``[B, T, hidden]``."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_named: bool
    """Whether ``hidden`` is passed by name too."""

    def make(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        given = {"hidden_states": hidden} if self.is_named else {}
        output = layer(*(() if self.is_named else (hidden,)), *self.args, **given, **self.kwargs)
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states

    def leaves(self) -> Iterator[Any]:
        yield from _leaves((self.args, dict(self.kwargs)))

    @property
    def is_plain(self) -> bool:
        """Whether no argument could carry state from layer to layer."""
        return all(isinstance(leaf, (*_PLAIN, torch.dtype, torch.Tensor)) for leaf in self.leaves())


def recorded(
    run: Callable[[], object], layers: Sequence[torch.nn.Module], *, as_tuple: bool
) -> tuple[Call, ...]:
    """The calls that ``run`` makes of layers, which only pass on their hidden states. ``as_tuple``: layers
    return a tuple of the states, as older families expect."""
    calls: list[Call] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        is_named = not args
        hidden = kwargs.pop("hidden_states") if is_named else args[0]
        calls.append(Call(hidden, args[1:], kwargs, is_named))
        return (hidden,) if as_tuple else hidden

    with answering(layers, note):
        run()
    return tuple(calls)


@contextmanager
def answering(layers: Sequence[torch.nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """Have ``answer`` called in place of each layer."""
    # The modules stay, as models ask them for their attributes.
    for layer in layers:
        layer.forward = answer
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def is_chain(calls: Sequence[Call], num_layers: int) -> bool:
    """Whether every layer was called once, with exactly the output of the layer before."""
    return len(calls) == num_layers and all(call.hidden is calls[0].hidden for call in calls)


def are_alike(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether layers are called with equal arguments, apart from the hidden states."""
    pairs = [([*call.leaves()], [*other.leaves()]) for call, other in zip(calls, others, strict=True)]
    return all(len(ours) == len(theirs) and all(map(_equal, ours, theirs)) for ours, theirs in pairs)


def tensors_of(calls: Sequence[Call]) -> Sequence[torch.Tensor]:
    leaves = {id(leaf): leaf for call in calls for leaf in call.leaves() if isinstance(leaf, torch.Tensor)}
    return tuple(leaves.values())


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and value:
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a model is run for."""

    remedy: str
    """What to do where it cannot be run layer by layer."""
    reads_router_inputs: bool = False
    reads_logits: bool = False
    runs_experts_alone: bool = False
    """Whether experts may be left out of the layers in memory, and are loaded where they run."""


_NOT_OURS = ("auto_map", "quantization_config", "output_router_logits")
# Names code that is not run; a quantisation, of which no tensor is left; and asks for more than is read.


def bare_model(base: Source, purpose: Purpose) -> torch.nn.Module:
    """The causal language model of the base's config, on the meta device, for float32.

    Attention is the eager one, which every family has and which adds up in one order.

    Raises PlanError: transformers has no such model, or the base's tensors do not fit it."""
    # Slow to import, and only wanted where a base model is run.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    problems = list(_unfit(base, purpose))
    if base.model_type not in CONFIG_MAPPING:
        raise PlanError([*problems, _unknown(base, purpose)])
    config: Any = None
    try:
        stated = base.checkpoint.config.items()
        fields = {key: _decoded(value) for key, value in stated if key not in _NOT_OURS}
        config = CONFIG_MAPPING[base.model_type].from_dict(fields)
    except Exception as error:  # what a config's checks raise depends on its class and version
        problems.append(_misread(base, error, purpose))
    # Models of several modalities read text as others do.
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    mapping = next((each for each in mappings if type(config) in each), None)
    if config is not None and mapping is None:
        what = f"transformers has no model for causal language of the kind {base.model_type}."
        problems.append(Problem(base.name, what, purpose.remedy))
    if problems:
        raise PlanError(problems)
    assert mapping is not None
    architecture: Any = mapping[type(config)]
    try:
        with torch.device("meta"):
            model: torch.nn.Module = architecture._from_config(
                config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            )
    except Exception as error:  # as above
        raise PlanError(_misread(base, error, purpose)) from error
    return model.eval()


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        is_number = value.keys() == {"__float__"}
        return float(value["__float__"]) if is_number else {k: _decoded(each) for k, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _unfit(base: Source, purpose: Purpose) -> Iterator[Problem]:
    if base.checkpoint.config.get("is_encoder_decoder"):
        what = "is an encoder with a decoder; only a decoder alone is run layer by layer."
        yield Problem(base.name, what, purpose.remedy)
    if any(name.endswith("ForMaskedLM") for name in class_names(base.checkpoint.config)):
        what = "is an encoder, which predicts masked tokens and not the next one."
        yield Problem(base.name, what, purpose.remedy)
    weights = quantised_tensors(base.checkpoint)
    yield from weights.faults
    if weights.unknown:
        formats = ", ".join(sorted(set(weights.unknown.values())))
        yield Problem(base.name, f"holds tensors in a format that is not read ({formats}).", USE_PLAIN)


def _unknown(base: Source, purpose: Purpose) -> Problem:
    stated = f"its config says model_type {base.model_type!r}" if base.model_type else "it has no model_type"
    own = "; its own code (auto_map) is not run" if base.checkpoint.config.get("auto_map") else ""
    what = f"{stated}, which the installed transformers does not know{own}."
    return Problem(base.name, what, f"Install a transformers that has it. {purpose.remedy}")


def _misread(base: Source, error: Exception, purpose: Purpose) -> Problem:
    names = ", ".join(class_names(base.checkpoint.config)) or base.model_type
    reason = " ".join(str(error).split())[:160]
    what = f"transformers cannot build {names} of its config ({type(error).__name__}: {reason})."
    return Problem(base.name, what, f"Mend its config.json. {purpose.remedy}")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, View | None], ...]
    """Logical tensors and where each lies within the parameter; None for one that is all of it."""
    has_codes: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * torch.float32.itemsize

    @property
    def loading_nbytes(self) -> int:
        """Extra bytes needed while it is loaded."""
        longest = max(prod(view.shape) if view else prod(self.shape) for _, view in self.parts)
        # The stored numbers, and what an adapter adds; of a stack one matrix in float32 as well. Codes are
        # decoded to float32 together with those that they share blocks with.
        return longest * torch.float32.itemsize * (4 if self.has_codes else 2)

    @property
    def is_stack(self) -> bool:
        """Whether each logical tensor lies at one index of the first dimension, as those of an expert do."""
        return all(view is not None and len(set(self._indices(view))) == 1 for _, view in self.parts)

    def _indices(self, view: View) -> tuple[int, int]:
        """Of the first dimension, where a view begins and ends."""
        size = prod(self.shape[1:])
        last = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
        return view.offset // size, (view.offset + last) // size

    def load_one(self, weights: Weights, index: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """What lies at one index of a stack, float32 ``[1, ...]``, and the bytes read for it."""
        weight, nbytes = torch.empty((1, *self.shape[1:]), device=device), 0
        for logical, view in self.parts:
            if view is not None and self._indices(view)[0] == index:
                own = replace(view, offset=view.offset - index * prod(self.shape[1:]))
                strided(weight.view(-1), own).copy_(weights.load(logical))
                nbytes += weights.nbytes(logical)
        return weight, nbytes

    def load(self, weights: Weights, device: torch.device) -> torch.Tensor:
        """float32; raises CheckpointError if it cannot be read."""
        if self.parts[0][1] is None:
            return weights.load(self.parts[0][0], device=device)
        weight = torch.empty(self.shape, device=device)
        for logical, view in self.parts:
            assert view is not None
            strided(weight.view(-1), view).copy_(weights.load(logical))
        return weight

    def read_bytes(self, weights: Weights) -> int:
        return sum(weights.nbytes(logical) for logical, _ in self.parts)


class ParameterFinder:
    def __init__(self, base: Source, weights: Weights, prefix: str) -> None:
        """``prefix``: start of names that a checkpoint of the bare model lacks, such as ``model.``."""
        self._base = base
        self._weights = weights
        self._names: Collection[str] = weights.names()
        self._prefix = prefix
        self.absent: list[str] = []
        """Names that nothing was found for."""

    def find(self, path: str, state: Mapping[str, torch.Tensor]) -> tuple[Parameter, ...]:
        """The parameters of the module at ``path`` that the checkpoint has."""
        parameters = []
        for name, tensor in state.items():
            parts = self._parts(f"{path}{name}", tuple(tensor.shape))
            if parts and tensor.is_floating_point():
                has_codes = any(self._weights.has_codes(logical) for logical, _ in parts)
                parameters.append(Parameter(name, tuple(tensor.shape), parts, has_codes))
            else:
                self.absent.append(f"{path}{name}")
        return tuple(parameters)

    def matrix(self, name: str, instead: str = "") -> str:
        """Logical name of a matrix with a row for each token, whatever their number; ``instead`` if it is
        absent."""
        logical = (logical_name(full, self._base.rules) for full in self._spellings(name))
        matrix = next((each for each in logical if each in self._names), instead)
        self.absent += [] if matrix else [name]
        return matrix

    def _parts(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[str, View | None], ...]:
        for full in self._spellings(name):
            logical = logical_name(full, self._base.rules)
            if self._has(logical, shape):
                return ((logical, None),)
            stack = tuple(self._stack(full, shape))
            if stack and all(self._has(each, view.shape) for each, view in stack):
                return stack
        return ()

    def _has(self, logical: str, shape: tuple[int, ...]) -> bool:
        return logical in self._names and self._weights.shape(logical) == shape

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix and name.startswith(self._prefix):
            yield name.removeprefix(self._prefix)

    def _stack(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        layout = fused_layout(name, shape, self._base.checkpoint.config, self._base.rules)
        if layout is not None and layout.kind != "unknown":
            views = fused_views(layout.kind, shape, len(layout.projections), layout.num_experts)
            yield from zip(logical_names(layout), views, strict=True)


def state_of(
    parameters: Collection[Parameter], weights: Weights, device: torch.device
) -> dict[str, torch.Tensor]:
    return {each.name: each.load(weights, device) for each in parameters}


_FEED_FORWARD = frozenset(
    {Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE}
)
_STATE_SPACE = frozenset({"A_log", "D"})
# What a state space has, and linear attention has not both of.


def _feed_forward(base: Source, layer: int, module: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the modules of a layer's feed-forward network; none if it has no such network."""
    names = [
        name
        for name in module.state_dict()
        if describe(f"layers.{layer}.{name}", base.rules).part in _FEED_FORWARD
    ]
    paths = [name.rpartition(".")[0].replace(".", "/") for name in names]
    if paths and (common := commonpath(paths)):
        return (common.replace("/", "."),)
    return tuple(dict.fromkeys(path.partition("/")[0] for path in paths if path))


def _decoder(base: Source, model: Any, purpose: Purpose) -> tuple[Any, str]:
    """The model without its head, and the name of its list of layers.

    It is the model's declared decoder, unless that is something else: then the first submodel with the
    config's number of layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    main = base.layer_stack(None)
    word = main.prefix.rpartition(".")[2] if main is not None else ""
    for each in (model.get_decoder(), *model.modules()):
        lists = [
            name
            for name, module in each.named_children()
            if isinstance(module, torch.nn.ModuleList) and len(module) == count
        ]
        if hasattr(each, "get_input_embeddings") and (word in lists or len(lists) == 1):
            return each, word if word in lists else lists[0]
    what = f"its config speaks of {count} layers, and {type(model).__name__} has no one list of as many."
    raise PlanError(Problem(base.name, what, purpose.remedy))


def compute_buffers(
    decoder: Any, part: torch.nn.Module, *, but: str | None, device: torch.device
) -> list[str]:
    """Compute the unsaved buffers of a part of a model whose parameters are all on the meta device.

    They are made on the CPU for every device, by transformers' own code for loaded checkpoints.

    ``part``: the decoder itself, or one of its layers. ``but``: name of a child of ``part`` to skip. Returns
    names of the buffers that nothing computes."""
    left: list[str] = []
    for path, module in part.named_modules():
        if but is not None and (path == but or path.startswith(f"{but}.")):
            continue
        names = [
            name
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
        ]
        if names:
            # What is computed does not depend on what was there before.
            first, second = (_computed(decoder, module, names, fill) for fill in (0, 1))
            left += [f"{path}.{name}" for name in names if not torch.equal(first[name], second[name])]
            module._buffers.update({name: buffer.to(device) for name, buffer in second.items()})
    return left


def _computed(
    decoder: Any, module: torch.nn.Module, names: list[str], fill: int
) -> Mapping[str, torch.Tensor]:
    for name in names:
        module._buffers[name] = torch.full_like(module.get_buffer(name), fill, device="cpu")
    with torch.no_grad():
        decoder._init_weights(module)
    return {name: module.get_buffer(name) for name in names}


def _path_of(module: torch.nn.Module, model: torch.nn.Module) -> str:
    """Where a module is in a model, with a dot behind; "" for the model itself."""
    return next((f"{name}." for name, each in model.named_modules() if each is module and name), "")


@dataclass(frozen=True, slots=True)
class Head:
    model: Any
    """All of the model: what it does to logits is its own."""
    linear: torch.nn.Linear
    matrix: str
    """Logical name of the weight."""
    bias: Parameter | None

    def rows_of(self, rows: range) -> tuple[Parameter, ...]:
        """Weight and bias of some rows, by their names in ``linear``."""
        weight = Parameter("weight", (len(rows), self.linear.in_features), ((self.matrix, None),), False)
        bias = self.bias
        return (weight,) if bias is None else (weight, replace(bias, shape=(len(rows),)))

    def fill(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.linear.bias = torch.nn.Parameter(bias, requires_grad=False)


_FEWEST_ROWS = 1024
_ROWS_AT_ONCE = 1024
_LOGIT_COPIES = 4
_MOST_LOGITS = 1 << 24
_READ_NBYTES = 1 << 16
# Rows of the head in memory, at least, and read at once; logits at once, with all that is made of them; and
# bytes of the embedding that are read at once for some rows of it.
_TRIAL = 7
# Tokens of the trial; a size that nothing else in a model has, so that it is seen what grows with them.
_ATTENTION_COPIES = 4
_HIDDEN_COPIES = 16
_WIDE_COPIES = 8
# Matrices of a layer's temporaries that are in memory at once, at most: of scores, of states, of the widest.


@dataclass(slots=True)
class ResidentLayer:
    """A layer in memory, while all batches go through it."""

    number: int
    module: torch.nn.Module
    parameters: tuple[Parameter, ...]
    """Of the module, by their names within it."""
    weights: Weights
    device: torch.device
    read_bytes: int
    num_batches: int = 1
    batch: int = 0
    """The batch that goes through it now."""
    tell: Callable[[int], None] = field(default=lambda _: None)
    """Is called with the bytes of the layer that are done with, of its stored ones."""
    _done_bytes: float = 0.0
    rehearse: Callable[[], None] = lambda: None
    """Runs the layer on every batch, and keeps nothing of what comes out. Whoever watches may raise
    ``LayerLeft`` in it, where a batch has no need to go further."""

    def load_one(self, name: str, index: int) -> torch.Tensor:
        """What lies at one index of a stack that is not in memory: float32 ``[1, ...]``."""
        parameter = next(each for each in self.parameters if each.name == name)
        weight, nbytes = parameter.load_one(self.weights, index, self.device)
        self.read_bytes += nbytes
        # It is read again for each batch.
        self._done_bytes += nbytes / self.num_batches
        self.tell(round(self._done_bytes))
        return weight


class LayerLeft(Exception):  # noqa: N818 - no error: it ends a rehearsal of a batch
    pass


class StreamedModel:
    """The base's model on the meta device; parts are filled while they are needed.

    The constructor tries on random numbers whether the model can be run so. It raises PlanError: all reasons
    why it cannot."""

    def __init__(self, base: Source, weights: Weights, purpose: Purpose) -> None:
        self._base = base
        self._weights = weights
        self._purpose = purpose
        model: Any = bare_model(base, purpose)
        # Whoever holds the decoder holds the layers; where no logits are asked for the head goes.
        self._decoder, self._word = _decoder(base, model, purpose)
        self._layers = tuple(self._decoder.get_submodule(self._word))
        self._embedding = self._decoder.get_input_embeddings()
        if not isinstance(self._embedding, torch.nn.Embedding):
            what = f"what takes the tokens in {type(self._decoder).__name__} is no plain embedding."
            raise PlanError(Problem(base.name, what, purpose.remedy))
        # It means nothing without training, and of the few rows that are in memory it may be none.
        self._embedding.padding_idx = None
        listed = enumerate(self._layers) if purpose.reads_router_inputs else ()
        self._feed_forward = [_feed_forward(base, *each) for each in listed]
        finder = ParameterFinder(base, weights, f"{model.base_model_prefix}.")
        self._find(finder, _path_of(self._decoder, model))
        self._head = self._find_head(finder, model) if purpose.reads_logits else None
        if problems := list(self._unreadable(finder.absent, type(model).__name__)):
            raise PlanError(problems)
        self._as_tuple = False
        self._calls = self._try()

    def _find(self, finder: ParameterFinder, path: str) -> None:
        """Find in the checkpoint what the decoder at ``path`` has; names are those within their module."""
        inner = next(name for name, module in self._decoder.named_modules() if module is self._embedding)
        self.embedding_name = finder.matrix(f"{path}{inner}.weight")
        self._inside = tuple(
            finder.find(f"{path}{self._word}.{number}.", layer.state_dict())
            for number, layer in enumerate(self._layers)
        )
        outside = {
            name: tensor
            for name, tensor in self._decoder.state_dict().items()
            if not name.startswith(f"{self._word}.")
            and self._decoder.get_submodule(name.rpartition(".")[0]) is not self._embedding
        }
        self._outside = finder.find(path, outside)

    def _find_head(self, finder: ParameterFinder, model: Any) -> Head:
        linear = model.get_output_embeddings()
        if not isinstance(linear, torch.nn.Linear):
            raise PlanError(self._refused("its head is no matrix with a row for each token"))
        path = _path_of(linear, model)
        # A stored head counts, though the config ties it: so does transformers.
        pair = self._base.pair
        stored = logical_name(pair.head, self._base.rules) if pair is not None else ""
        instead = stored if stored in self._weights.names() else ""
        if linear.weight is self._embedding.weight:
            instead = instead or self.embedding_name
        matrix = finder.matrix(f"{path}weight", instead)
        bias = () if linear.bias is None else finder.find(path, {"bias": linear.bias})
        return Head(model, linear, matrix, bias[0] if bias else None)

    def _unreadable(self, absent: Sequence[str], architecture: str) -> Iterator[Problem]:
        """All reasons why the checkpoint cannot be read layer by layer."""
        # Computed without kernels, a scan takes for each token the memory of the state or many times that:
        # more than a budget could cover.
        scanning = [
            number
            for number, layer in enumerate(self._layers)
            if any(module._parameters.keys() >= _STATE_SPACE for module in layer.modules())
        ]
        reasons = {
            "without a feed-forward network in whose place experts could come": [
                number for number, paths in enumerate(self._feed_forward) if not paths
            ],
            f"with a state space ({architecture}), whose memory cannot be foretold": scanning,
        }
        for reason, layers in reasons.items():
            if layers:
                what = f"layers {reason}: {', '.join(map(str, layers))}."
                yield Problem(self._base.name, what, self._purpose.remedy)
        if absent:
            what = f"{len(absent)} tensors of {architecture} are not in it by name and shape: "
            what += f"{shortlist(absent)}."
            remedy = f"Save it with transformers' save_pretrained and name the result. {self._purpose.remedy}"
            yield Problem(self._base.name, what, remedy)

    @property
    def layers(self) -> tuple[torch.nn.Module, ...]:
        return self._layers

    def parameters(self, layer: int) -> tuple[Parameter, ...]:
        return self._inside[layer]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def width(self) -> int:
        return int(self._calls[0].hidden.shape[-1])

    @property
    def outside(self) -> tuple[Parameter, ...]:
        """What is neither in a layer, nor the embedding or the head."""
        return self._outside

    def outside_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those of ``outside`` that are in memory and can be trained, by name."""
        names = {each.name for each in self._outside}
        return {name: each for name, each in self._decoder.named_parameters() if name in names}

    @property
    def outside_bytes(self) -> int:
        return sum(each.nbytes for each in self._outside)

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding."""
        return self._weights.shape(self.embedding_name)[0]

    @property
    def embedding_width(self) -> int:
        return self._weights.shape(self.embedding_name)[1]

    def least_bytes(self, shape: Shape) -> int:
        """Bytes of memory for one batch of a shape, without its kept states."""
        inside = max(sum(map(self._kept_bytes, layer)) for layer in self._inside)
        every = [*self._outside, *(each for layer in self._inside for each in layer)]
        loading = max(each.loading_nbytes for each in every)
        layer = inside + loading + self.call_bytes(shape) + self._temporaries(every, shape)
        head = 0 if self._head is None else self.head_bytes(shape, self.fewest_rows)
        return self.outside_bytes + max(layer, head)

    def _kept_bytes(self, parameter: Parameter) -> int:
        return parameter.nbytes // (parameter.shape[0] if self._is_left(parameter) else 1)

    def _is_left(self, parameter: Parameter) -> bool:
        return self._purpose.runs_experts_alone and parameter.is_stack

    @property
    def left_bytes(self) -> int:
        """Bytes of memory, beyond the least, of layers with all of their experts."""
        return max(sum(each.nbytes - self._kept_bytes(each) for each in layer) for layer in self._inside)

    def backward_bytes(self, shape: Shape, num_windows: int) -> int:
        """Bytes of memory beside ``least_bytes`` for the way back: of a layer the gradient, its squares, the
        graph of one window of batches of a shape, and sums in float64; of the head a graph for a batch."""
        inside = max(sum(each.nbytes for each in layer) for layer in self._inside)
        every = [*self._outside, *(each for layer in self._inside for each in layer)]
        experts = expert_fields(self._base.checkpoint.config, self._base.rules)
        per_token = experts.chosen.value if experts is not None and experts.chosen is not None else 1
        graph = self._temporaries(every, Shape(1, shape.length)) * (1 + per_token)
        # A gradient of each window is held until all rows of the head have added to it.
        vectors = num_windows * sum(each.nbytes for each in self._outside if len(each.shape) < 2)
        head = self.head_bytes(shape, 2 * self.fewest_rows)
        return max(4 * inside + graph, head + vectors) + 3 * self.outside_bytes

    def call_bytes(self, shape: Shape) -> int:
        """Most bytes of the masks and positions in the layer calls for a batch of a shape."""
        tensors = tensors_of(self._calls)
        sizes = (prod(shape.length if n == _TRIAL else n for n in each.shape) for each in tensors)
        return shape.batch * sum(n * each.element_size() for n, each in zip(sizes, tensors, strict=True))

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[int]:
        outside = self._outside
        with self._weights:
            self._fill_outside(state_of(outside, self._weights, device), device)
            try:
                yield sum(each.read_bytes(self._weights) for each in outside)
            finally:
                self._decoder.to("meta")

    def embed(self, tokens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
        """The input of the first layer, float32 ``[B, T, hidden]``, for tokens ``[B, T]`` on the CPU, and the
        bytes read for it."""
        used, rows = self._rows_of(tokens)
        nbytes = self._weights.nbytes(self.embedding_name) * len(used) // self.num_tokens
        return self._run(tokens.to(device), used.to(device), rows.to(device))[0].hidden, nbytes

    def _rows_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens in rising order, each once, and their rows of the embedding."""
        name, used = self.embedding_name, torch.unique(tokens)
        at_once = max(1, _READ_NBYTES * self.num_tokens // self._weights.nbytes(name))
        return used, self._weights.read_rows(name, used.tolist(), at_once=at_once)

    def embed_graph(self, tokens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the first layer with a graph, and the leaf of that: the rows of the embedding of all
        tokens, in rising order."""
        used, rows = self._rows_of(tokens)
        with self._embedded(used.to(device), rows.to(device)), torch.enable_grad():
            leaf = self._embedding.weight.requires_grad_()
            given = tokens.to(device)
            calls = recorded(
                lambda: self._decoder(input_ids=given, use_cache=False), self._layers, as_tuple=self._as_tuple
            )
        return calls[0].hidden, leaf

    def calls(self, shape: Shape, device: torch.device) -> tuple[Call, ...]:
        zeros = torch.zeros(shape, dtype=torch.int64, device=device)
        rows = torch.zeros(1, self._embedding.embedding_dim, device=device)
        return self._run(zeros, zeros[0, :1], rows)

    @contextmanager
    def resident(self, layer: int, device: torch.device, *, is_whole: bool = True) -> Iterator[ResidentLayer]:
        """Have a layer in memory; where it is not whole, without the experts that are loaded one by one."""
        module, parameters = self._layers[layer], self._inside[layer]
        compute_buffers(self._decoder, module, but=None, device=device)
        loaded = [each for each in parameters if is_whole or not self._is_left(each)]
        module.load_state_dict(state_of(loaded, self._weights, device), assign=True, strict=is_whole)
        nbytes = sum(each.read_bytes(self._weights) for each in loaded)
        try:
            yield ResidentLayer(layer, module, parameters, self._weights, device, nbytes)
        finally:
            module.to("meta")
            return_free_memory()

    def run(self, layer: int, call: Call, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a resident layer on hidden states ``[B, T, hidden]``. Returns output of the layer, and input of
        its feed-forward network: both ``[B, T, hidden]``, the latter empty where it is not read."""
        module, seen = self._layers[layer], list[torch.Tensor]()

        def listen(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Of a network in several pieces the first that runs is given what the network is given.
            if not seen:
                seen.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

        paths = self._feed_forward[layer] if self._feed_forward else ()
        pieces = [module.get_submodule(path) for path in paths]
        hooks = [each.register_forward_pre_hook(listen, with_kwargs=True) for each in pieces]
        try:
            # A copy, as layers may add to what they are given.
            output = call.make(module, hidden.clone())
        finally:
            for hook in hooks:
                hook.remove()
        return output, seen[0].reshape(hidden.shape) if pieces else hidden[:0]

    @property
    def num_rows(self) -> int:
        """Tokens that the head tells apart."""
        return self._weights.shape(self.head.matrix)[0]

    @property
    def fewest_rows(self) -> int:
        """Rows of the head that are always in memory at once."""
        return min(_FEWEST_ROWS, self.num_rows)

    def head_bytes(self, shape: Shape, rows: int) -> int:
        """Bytes of memory for some rows of the head and their logits of one batch."""
        head = self.head
        height, width = self._weights.shape(head.matrix)
        # The rows and, while they are read, what is stored; all of a matrix that is not read by rows.
        loading = rows if self._weights.reads_rows(head.matrix) else 4 * height
        logits = shape.num_tokens * (_LOGIT_COPIES * rows + _HIDDEN_COPIES * self.width)
        matrices = (rows + loading) * width + (0 if head.bias is None else 2 * height)
        return torch.float32.itemsize * (logits + matrices) + self.call_bytes(shape)

    def most_rows(self, shape: Shape, room: int) -> int:
        """Rows of the head to have in memory for batches of a shape: as many as fit, and few enough for
        caches."""
        one = self.head_bytes(shape, 1) - self.head_bytes(shape, 0)
        fitting = (room - self.head_bytes(shape, 0)) // one
        return max(self.fewest_rows, min(self.num_rows, fitting, _MOST_LOGITS // shape.num_tokens))

    @contextmanager
    def head_rows(self, rows: range, device: torch.device) -> Iterator[int]:
        """Have some rows of the head in memory; gives the bytes read for them."""
        head, matrix = self.head, self.head.matrix
        if len(rows) == self.num_rows:
            weight = self._weights.load(matrix, device=device)
        else:
            weight = self._weights.read_rows(matrix, rows, at_once=_ROWS_AT_ONCE).to(device)
        bias = None if head.bias is None else head.bias.load(self._weights, device)[rows.start : rows.stop]
        head.fill(weight, bias)
        try:
            yield self._weights.nbytes(matrix) * len(rows) // self.num_rows
        finally:
            head.linear.to("meta")
            return_free_memory()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the rows of the head that are in memory, for the last layer's output ``[B, T, hidden]``: float32
        ``[B, T, rows]``. With a graph, of which the head is a leaf, where ``hidden`` requires a gradient."""
        for leaf in self.head.linear.parameters():
            leaf.requires_grad_(hidden.requires_grad)
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        rows = torch.zeros(1, self._embedding.embedding_dim, device=hidden.device)
        answer = (hidden,) if self._as_tuple else hidden
        with (
            self._embedded(tokens[0, :1], rows),
            answering(self._layers, lambda *_, **__: answer),
            torch.set_grad_enabled(hidden.requires_grad),
        ):
            output: torch.Tensor = self.head.model(input_ids=tokens, use_cache=False).logits
        return output.float()

    @property
    def head(self) -> Head:
        assert self._head is not None
        return self._head

    def _try(self) -> tuple[Call, ...]:
        """Run the model with random numbers outside its layers; returns the layer calls."""
        decoder = self._decoder
        numbers = torch.Generator().manual_seed(0)
        state = {each.name: _random(each.shape, numbers) for each in self._outside}
        left = self._fill_outside(state, torch.device("cpu"))
        for number, layer in enumerate(self._layers):
            missing = compute_buffers(decoder, layer, but=None, device=torch.device("cpu"))
            left += [f"layer {number}: {name}" for name in missing]
            layer.to("meta")
        if left:
            raise PlanError(self._refused(f"nothing says how to compute its buffers {', '.join(left[:3])}"))
        try:
            calls = self._tried(numbers)
            if self._head is not None:
                self._try_head(self._head, calls[0].hidden.shape[-1], numbers)
            return calls
        except Exception as error:
            if isinstance(error, PlanError):
                raise
            # What the code of a family raises when its layers answer as they do not in earnest is its own.
            reason = " ".join(str(error).split())[:160]
            raise PlanError(self._refused(f"it fails with {type(error).__name__} ({reason})")) from error
        finally:
            decoder.to("meta")

    def _tried(self, numbers: torch.Generator) -> tuple[Call, ...]:
        def numbered(first: int) -> torch.Tensor:
            return torch.arange(first, first + _TRIAL)

        def trial(tokens: torch.Tensor) -> tuple[Call, ...]:
            used = torch.tensor(sorted(set(tokens.tolist())))
            rows = torch.randn(len(used), self._embedding.embedding_dim, generator=numbers)
            return self._run(tokens[None], used, rows)

        calls = self._in_either_form(lambda: trial(numbered(3)))
        if not is_chain(calls, self.num_layers):
            raise PlanError(self._refused("it does more between layers than to hand on their results"))
        if not all(call.is_plain for call in calls):
            raise PlanError(self._refused("its layers leave things for one another"))
        # Zeros, as it is called with in earnest; and its padding, for which some look.
        padding = getattr(self._decoder.config, "pad_token_id", None) or 0
        others = (numbered(3 + _TRIAL), torch.zeros_like(numbered(0)), torch.full_like(numbered(0), padding))
        if not all(are_alike(calls, trial(tokens)) for tokens in others):
            raise PlanError(self._refused("its layers are called with more that depends on the tokens"))
        return calls

    def _in_either_form(self, trial: Callable[[], tuple[Call, ...]]) -> tuple[Call, ...]:
        """Calls of layers that return their states, or if that fails a tuple of them."""
        # What goes wrong in the first form may be right in the second; if not, the second tells why.
        with suppress(Exception):
            calls = trial()
            if is_chain(calls, self.num_layers):
                return calls
        self._as_tuple = True
        return trial()

    def _try_head(self, head: Head, width: int, numbers: torch.Generator) -> None:
        """Whether logits of some rows of the head are those of all of them."""
        hidden = torch.randn(1, _TRIAL, width, generator=numbers)
        weight = torch.randn(_TRIAL, head.linear.in_features, generator=numbers)
        bias = None if head.linear.bias is None else torch.randn(_TRIAL, generator=numbers)
        made = []
        for rows in (slice(None), slice(0, 3), slice(3, None)):
            head.fill(weight[rows], None if bias is None else bias[rows])
            made.append(self.logits(hidden))
        head.linear.to("meta")
        whole, parts = made[0], torch.cat(made[1:], dim=-1)
        if whole.shape != parts.shape or not torch.allclose(whole, parts, rtol=1e-4, atol=1e-5):
            raise PlanError(self._refused("its logits are no function of one row of its head each"))

    def _run(self, tokens: torch.Tensor, used: torch.Tensor, rows: torch.Tensor) -> tuple[Call, ...]:
        with self._embedded(used, rows):
            return recorded(
                lambda: self._decoder(input_ids=tokens, use_cache=False),
                self._layers,
                as_tuple=self._as_tuple,
            )

    @contextmanager
    def _embedded(self, used: torch.Tensor, rows: torch.Tensor) -> Iterator[None]:
        """Have the rows of some tokens in memory, in rising order."""
        embedding = self._embedding
        embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
        hook = embedding.register_forward_pre_hook(
            lambda _, inputs: (torch.searchsorted(used, inputs[0]), *inputs[1:])
        )
        try:
            with torch.no_grad():
                yield
        finally:
            hook.remove()
            embedding.weight = torch.nn.Parameter(rows.to("meta"), requires_grad=False)

    def _fill_outside(self, state: dict[str, torch.Tensor], device: torch.device) -> list[str]:
        """Fill what is outside the layers; returns the buffers that nothing computes."""
        decoder = self._decoder
        # Buffers first: computing them would start parameters anew that are there.
        left = compute_buffers(decoder, decoder, but=self._word, device=device)
        decoder.load_state_dict(state, assign=True, strict=False)
        return left

    def _temporaries(self, every: Sequence[Parameter], shape: Shape) -> int:
        config: Any = self._decoder.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        widest = max(max(each.shape[-2:], default=1) for each in every)
        per_token = (
            _HIDDEN_COPIES * self.width + _WIDE_COPIES * widest + _ATTENTION_COPIES * heads * shape.length
        )
        return torch.float32.itemsize * shape.num_tokens * per_token

    def _refused(self, why: str) -> Problem:
        what = f"transformers' {type(self._decoder).__name__} cannot be run layer by layer: {why}."
        return Problem(self._base.name, what, self._purpose.remedy)


def _random(shape: tuple[int, ...], numbers: torch.Generator) -> torch.Tensor:
    """Random numbers with stride 0, so that large tensors take no memory."""
    return torch.randn(sum(shape) or 1, generator=numbers).as_strided(shape, (1,) * len(shape))


_FILE = "hidden_states.bin"


def check_finite(values: torch.Tensor, where: str, *, model: str, texts: Sequence[str]) -> None:
    """Raises NonFiniteError: values that ``where`` gives for some texts hold NaN or infinity."""
    if math.isfinite(float(values.sum(dtype=torch.float64))):
        return
    what = f"{where} gives NaN or infinity for {', '.join(sorted(set(texts)))}."
    remedy = "Check its weights, for example by `raymerge inspect`, and the recipe that they came from."
    raise NonFiniteError(Problem(model, what, remedy))


Visit: TypeAlias = "Callable[[int, int, torch.Tensor, torch.Tensor], None]"
"""Is called with each layer's number, the batch's, the layer's input and that of its feed-forward network
(and so of a router there), both float32 ``[B, T, hidden]`` on the device; batches in order, for layer after
layer."""


States: TypeAlias = "list[torch.Tensor] | StateFile"
"""The hidden states of each batch, float32 ``[B, T, hidden]`` on the CPU."""
Watch: TypeAlias = "Callable[[ResidentLayer], AbstractContextManager[object]]"
"""Is entered once a layer is in memory, and left when all batches went through it."""
Finish: TypeAlias = "Callable[[StreamedModel, States, int], int]"
"""Is called with the model, the last layer's outputs and the bytes of memory to use; returns bytes read."""


def kept_nbytes(num_tokens: int, width: int) -> int:
    return num_tokens * width * torch.float32.itemsize


class StateFile:
    """The last hidden states of each batch, float32 ``[B, T, hidden]`` on the CPU, in a file of a store.

    The file is read and written, not mapped: mapped pages would count as the worker's memory."""

    def __init__(self, shapes: Sequence[Shape], width: int, store: LocalStore) -> None:
        self._store = store
        self._shapes = [(*shape, width) for shape in shapes]
        self._offsets = [0, *accumulate(kept_nbytes(shape.num_tokens, width) for shape in shapes)]

    def __setitem__(self, batch: int, hidden: torch.Tensor) -> None:
        self._store.write_at(_FILE, self._offsets[batch], hidden.contiguous().numpy().data)

    def __getitem__(self, batch: int) -> torch.Tensor:
        states = torch.empty(self._shapes[batch])
        # A flat view of bytes, which is what stores fill.
        self._store.read_into(_FILE, self._offsets[batch], states.view(torch.uint8).view(-1).numpy().data)
        return states


@contextmanager
def spill_directory(staging: Path, prefix: str) -> Iterator[Path]:
    """A directory below ``staging`` for what an attempt at a unit puts aside; those of attempts that were
    killed go. One that was given up but is still alive has its file open, and writes other states: each has a
    file of its own."""
    for left in staging.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    spill = Path(tempfile.mkdtemp(prefix=prefix, dir=staging))
    try:
        yield spill
    finally:
        shutil.rmtree(spill, ignore_errors=True)


@contextmanager
def keep_states(shapes: Sequence[Shape], width: int, *, spill: Path | None) -> Iterator[States]:
    """The last hidden states of each batch in memory, or in a temporary file below ``spill``. Raises
    OptionError: the filesystem has no room for the file."""
    if spill is None:
        yield [torch.empty(0)] * len(shapes)
        return
    store = LocalStore(spill)
    try:
        with store:
            store.create(_FILE, sum(kept_nbytes(shape.num_tokens, width) for shape in shapes))
            yield StateFile(shapes, width, store)
    finally:
        store.remove(_FILE)


@dataclass(slots=True)
class _Passes:
    """Runs resident layers on the batches."""

    model: StreamedModel
    shapes: Sequence[Shape]
    states: States
    device: torch.device
    limit: int
    """Bytes of memory for the arguments of layer calls."""
    calls: dict[Shape, tuple[Call, ...]] = field(default_factory=dict)

    def run(self, layer: ResidentLayer, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input of the layer for a batch, its output, and the input of its feed-forward network."""
        layer.batch, shape = batch, self.shapes[batch]
        if shape not in self.calls:
            # They are made anew where they would take more than there is.
            if sum(map(self.model.call_bytes, (*self.calls, shape))) > self.limit:
                self.calls.clear()
            self.calls[shape] = self.model.calls(shape, self.device)
        hidden = self.states[batch].to(self.device)
        return hidden, *self.model.run(layer.number, self.calls[shape][layer.number], hidden)

    def rehearse(self, layer: ResidentLayer) -> None:
        for batch in range(len(self.shapes)):
            with suppress(LayerLeft):
                self.run(layer, batch)


class LayerStream:
    """A base model that is read layer by layer.

    Its model on the meta device is built at first use, and kept."""

    def __init__(self, base: Source, purpose: Purpose) -> None:
        self._base = base
        self._purpose = purpose
        self._spare: StreamedModel | None = None

    def check(self) -> None:
        """Raises PlanError: it cannot be streamed, with all reasons; tried on a few random numbers."""
        with self._model():
            pass

    def num_layers(self) -> int:
        """Raises PlanError as ``check``."""
        with self._model() as model:
            return model.num_layers

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Its layers, on the meta device; raises PlanError as ``check``."""
        with self._model() as model:
            return model.layers

    def parameters(self, layer: int) -> tuple[Parameter, ...]:
        """Those of a layer that the checkpoint has; raises PlanError as ``check``."""
        with self._model() as model:
            return model.parameters(layer)

    def width(self) -> int:
        """Raises PlanError as ``check``."""
        with self._model() as model:
            return model.width

    def least_budget(self, shape: Shape) -> int:
        """Fewest bytes of memory for batches of up to this shape; raises PlanError as ``check``."""
        with self._model() as model:
            return model.least_bytes(shape)

    def backward_bytes(self, shape: Shape, num_windows: int) -> int:
        """As of the model; raises PlanError as ``check``."""
        with self._model() as model:
            return model.backward_bytes(shape, num_windows)

    def read(
        self,
        batches: Sequence[torch.Tensor],
        visit: Visit,
        *,
        device: torch.device,
        budget: int,
        spill: Path,
        tell: Callable[[int], None] = lambda _: None,
        watch: Watch = nullcontext,
        finish: Finish = lambda *_: 0,
    ) -> int:
        """Visit the states of every batch at every layer, with one layer in memory at a time. ``batches``:
        tokens, int64 ``[B, T]`` on the CPU. ``budget``: bytes of memory to use; states that do not fit go to
        a file. ``spill``: directory for that file, of this call alone. ``tell``: called after each layer, and
        each expert, with the bytes of the model that are done with; what it raises ends the reading.
        ``watch``: entered for each layer, and left before ``tell``. ``finish``: called once, after the last
        layer. Returns bytes read."""
        if not batches:
            return 0
        shapes = [Shape(*each.shape) for each in batches]
        with self._model() as model, _deterministic(), torch.no_grad(), model.opened(device) as read:
            spare = budget - max(map(model.least_bytes, set(shapes)))
            held_nbytes = sum(kept_nbytes(shape.num_tokens, model.width) for shape in shapes)
            # Each expert is read once for all batches where the layer's fit; for one batch, whatever fits.
            is_whole = not model.left_bytes or (len(batches) > 1 and model.left_bytes <= spare)
            spare -= model.left_bytes if is_whole else 0
            in_memory = held_nbytes <= spare
            limit = spare - held_nbytes if in_memory else spare
            with keep_states(shapes, model.width, spill=None if in_memory else spill) as states:
                passes = _Passes(model, shapes, states, device, limit)
                for batch, tokens in enumerate(batches):
                    hidden, nbytes = model.embed(tokens, device)
                    states[batch] = hidden.cpu()
                    read += nbytes
                done = read
                for layer in range(model.num_layers):
                    with model.resident(layer, device, is_whole=is_whole) as resident:
                        resident.num_batches = len(batches)
                        resident.tell = partial(_tell_more, tell, done)
                        resident.rehearse = partial(passes.rehearse, resident)
                        with watch(resident):
                            for batch in range(len(shapes)):
                                hidden, output, router_input = passes.run(resident, batch)
                                visit(layer, batch, hidden, router_input)
                                states[batch] = output.cpu()
                    read += resident.read_bytes
                    done += sum(each.read_bytes(resident.weights) for each in resident.parameters)
                    tell(done)
                passes.calls.clear()
                room = budget - model.outside_bytes - (held_nbytes if in_memory else 0)
                return read + finish(model, states, room)

    @contextmanager
    def _model(self) -> Iterator[StreamedModel]:
        """The model on the meta device, for one caller at a time; dropped after a failure."""
        model, self._spare = self._spare, None
        if model is None:
            with Weights(self._base) as weights:
                model = StreamedModel(self._base, weights, self._purpose)
        yield model
        self._spare = model


def _tell_more(tell: Callable[[int], None], before: int, nbytes: int) -> None:
    tell(before + nbytes)


@contextmanager
def _deterministic() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        yield
    finally:
        cudnn.deterministic = before
