"""The negative log-likelihood of texts under a model that is read layer by layer.

Every window of every text goes through a layer before the next is read, so each weight is read and decoded
once, however large the model is; the head comes last, some rows at a time. The arithmetic is float32; what
is added up over rows of the head, tokens and windows is float64.

Windows are computed in batches, whose size follows from the memory: results agree to rounding for any limit
and number of threads, and to the bit for the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raymerge.deferred import torch
from raymerge.device_numerics import full_float32
from raymerge.errors import NonFiniteError, OptionError, Problem
from raymerge.planner.inputs.sources import Source
from raymerge.stages.streamed_model import LayerStream, Purpose, Shape, States, StreamedModel, check_finite
from raymerge.stages.texts import Text, Window
from raymerge.units import format_size

EVALUATION = Purpose("Measure it by a program that has whole models in memory.", reads_logits=True)

_BATCH_TOKENS = 2048
"""Tokens of a batch where memory allows: more are no faster."""
_LENGTH_STEP = 32
# Windows of a batch are padded behind, to multiples of this: few lengths have few masks.

OnLayer = Callable[[int, int], None]
"""Is called after each layer with the number of layers that are done, and of all."""


@dataclass(frozen=True, slots=True)
class TextLoss:
    name: str
    num_tokens: int
    """Tokens that were judged."""
    loss: float
    """Mean of -log p(token), in nats."""

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, slots=True)
class Evaluation:
    model: str
    length: int
    """Tokens of a window."""
    device: str
    texts: tuple[TextLoss, ...]

    @property
    def mean(self) -> float:
        """Mean of the losses, each text counting the same."""
        return math.fsum(text.loss for text in self.texts) / len(self.texts)

    def to_json(self) -> dict[str, Any]:
        texts = [{**asdict(text), "perplexity": text.perplexity} for text in self.texts]
        facts = {"model": self.model, "length": self.length, "device": self.device}
        return {**facts, "texts": texts, "mean": self.mean}


class Evaluator:
    """Measures models on the same texts."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        memory: int,
        spill: Path,
        device: torch.device | None = None,
        num_shares: int = 1,
    ) -> None:
        """``texts``: tokens of every model that is measured, so of one tokenizer. ``memory``: bytes, of which
        one of ``num_shares`` equal shares is for this. ``spill``: directory for hidden states that do not
        fit; nobody else's."""
        self._texts = texts
        self._num_shares = num_shares
        self._budget = memory // num_shares
        self._spill = spill
        self._device = device or torch.device("cpu")

    def losses(self, source: Source, *, on_layer: OnLayer = lambda *_: None) -> tuple[TextLoss, ...]:
        """The loss of each text under a model.

        Raises:
            PlanError: the model cannot be run layer by layer.
            OptionError: the memory is too little for one window.
            NonFiniteError: it computes NaN or infinity.
            CheckpointError: its weights cannot be read."""
        stream = LayerStream(source, EVALUATION)
        batches = self._batches(stream, source)
        scores = _Scores(source.name, self._texts, batches, self._device)
        layers, num_layers = 0, stream.num_layers()

        def visit(layer: int, batch: int, hidden: torch.Tensor, _: torch.Tensor) -> None:
            scores.check(hidden, batch, f"layer {layer - 1}" if layer else "the embedding")

        def tell(_: int) -> None:
            nonlocal layers
            layers += 1
            on_layer(layers, num_layers)

        with full_float32():
            stream.read(
                [batch.tokens for batch in batches],
                visit,
                device=self._device,
                budget=self._budget,
                spill=self._spill,
                tell=tell,
                finish=scores.finish,
            )
        return scores.losses()

    def _batches(self, stream: LayerStream, source: Source) -> Sequence[_Batch]:
        """The windows of all texts in batches that fit into memory, the longest first."""
        placed = [(number, window) for number, text in enumerate(self._texts) for window in text.windows]
        placed.sort(key=lambda each: -len(each[1].tokens))
        longest = len(placed[0][1].tokens)
        num_tokens = max(_BATCH_TOKENS, longest)
        while stream.least_budget(Shape(num_tokens // longest, longest)) > self._budget:
            if num_tokens // longest == 1:
                raise OptionError(self._too_little(stream, source, longest))
            num_tokens = num_tokens // longest // 2 * longest
        batches = []
        while placed:
            length = len(placed[0][1].tokens)
            length = min(longest, -(-length // _LENGTH_STEP) * _LENGTH_STEP)
            count = num_tokens // length
            batches.append(_Batch.of(placed[:count], length))
            placed = placed[count:]
        return batches

    def _too_little(self, stream: LayerStream, source: Source, longest: int) -> Problem:
        least = stream.least_budget(Shape(1, longest))
        what = f"{format_size(self._budget)} are too little for a layer of {source.name} and a window of "
        what += f"{longest} tokens."
        whole = least * self._num_shares
        remedy = f"The smallest that works is {whole} bytes; shorter windows (--length) need less."
        return Problem("--memory", what, remedy)


@dataclass(frozen=True, slots=True)
class _Batch:
    tokens: torch.Tensor
    """int64 ``[B, T]``, padded behind, where nothing that is judged looks."""
    texts: tuple[int, ...]
    """The text of each window."""
    targets: torch.Tensor
    """int64 ``[B, T]``: the token that comes next; -1 where it is not judged."""

    @classmethod
    def of(cls, placed: Sequence[tuple[int, Window]], length: int) -> _Batch:
        tokens = np.zeros((len(placed), length), dtype=np.int64)
        targets = np.full_like(tokens, -1)
        for row, (_, window) in enumerate(placed):
            count = len(window.tokens)
            tokens[row, :count] = window.tokens
            tokens[row, count:] = window.tokens[-1]
            targets[row, : count - 1] = np.where(window.is_judged, window.tokens, -1)[1:]
        return cls(torch.from_numpy(tokens), tuple(text for text, _ in placed), torch.from_numpy(targets))

    @property
    def shape(self) -> Shape:
        return Shape(*self.tokens.shape)


class _Scores:
    """Log-likelihoods of the tokens of batches, from some rows of the head after the other."""

    def __init__(
        self, model: str, texts: Sequence[Text], batches: Sequence[_Batch], device: torch.device
    ) -> None:
        self._model = model
        self._texts = texts
        self._batches = batches
        self._device = device
        # float64 [B * T] each: the logarithm of the sum of all likelihoods, and the logit of the next token.
        self._totals = [torch.full((each.shape.num_tokens,), -math.inf).double() for each in batches]
        self._logits = [torch.zeros(each.shape.num_tokens).double() for each in batches]

    def check(self, hidden: torch.Tensor, batch: int, where: str) -> None:
        """Raises NonFiniteError: states hold NaN or infinity."""
        texts = [self._texts[text].name for text in self._batches[batch].texts]
        check_finite(hidden, where, model=self._model, texts=texts)

    def finish(self, model: StreamedModel, states: States, room: int) -> int:
        for batch in range(len(self._batches)):
            self.check(states[batch], batch, "the last layer")
        read, step = 0, min(model.most_rows(each.shape, room) for each in self._batches)
        for first in range(0, model.num_rows, step):
            rows = range(first, min(first + step, model.num_rows))
            with model.head_rows(rows, self._device) as nbytes:
                for batch in range(len(self._batches)):
                    self._add(batch, rows, model.logits(states[batch].to(self._device)))
            read += nbytes
        return read

    def _add(self, batch: int, rows: range, logits: torch.Tensor) -> None:
        """Add the logits ``[B, T, rows]`` of some rows of the head; they are overwritten."""
        logits, targets = logits.flatten(0, 1), self._batches[batch].targets.flatten() - rows.start
        (places,) = torch.where((targets >= 0) & (targets < len(rows)))
        chosen = logits[places.to(logits.device), targets[places].to(logits.device)]
        self._logits[batch][places] = chosen.double().cpu()
        # Not the infinity of a row that is masked: all of some rows may be.
        largest = logits.amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        sums = logits.sub_(largest).exp_().sum(1)
        total = (largest[:, 0].double() + sums.double().log()).cpu()
        self._totals[batch] = torch.logaddexp(self._totals[batch], total)

    def losses(self) -> tuple[TextLoss, ...]:
        sums: list[list[float]] = [[] for _ in self._texts]
        for number, batch in enumerate(self._batches):
            each = (self._totals[number] - self._logits[number]).view(batch.shape)
            each = each.where(batch.targets >= 0, 0.0).sum(1)
            for text, value in zip(batch.texts, each.tolist(), strict=True):
                sums[text].append(value)
        return tuple(
            self._loss(text, math.fsum(values)) for text, values in zip(self._texts, sums, strict=True)
        )

    def _loss(self, text: Text, total: float) -> TextLoss:
        if not math.isfinite(total):
            what = f"the head gives NaN or infinity for {text.name}."
            remedy = "Check the weights of its last norm and its head, for example by `raymerge inspect`."
            raise NonFiniteError(Problem(self._model, what, remedy))
        return TextLoss(text.name, text.num_judged, total / text.num_judged)
