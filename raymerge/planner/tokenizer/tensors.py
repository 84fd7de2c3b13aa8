"""Which tensors of a source have a row, or an element, for each token: what names and sizes say together."""

from __future__ import annotations

from collections.abc import Mapping

from raymerge.architectures import Role, TensorInfo
from raymerge.architectures.sections import text_section
from raymerge.checkpoints.header import StoredTensor
from raymerge.planner.matching.input_resolver import InputResolver

_BY_POSITION = frozenset(
    {"position_embeddings", "embed_positions", "wpe", "position_embedding", "token_type_embeddings"}
)
# Embeddings of something else than tokens, which may happen to have as many rows.


class VocabularyTensors:
    """The vocabulary tensors of all sources."""

    def __init__(self, resolver: InputResolver) -> None:
        self._resolver = resolver

    def axis(self, source: int, name: str) -> int | None:
        """The axis on which a source's tensor counts tokens; None for a tensor that counts none.

        Embeddings, heads and their biases, also those of multi-token-prediction layers, count them on the
        first one; a bias that lies as ``[1, vocabulary]`` counts them on the second.
        """
        tensors, pair = self._resolver.sources[source].checkpoint.tensors, self._resolver.sources[source].pair
        shape = tensors[name].shape
        if pair is None or not shape:
            return None
        if name in (pair.embedding, pair.head):
            return 0
        if not self._is_named_so(source, name):
            return None
        sizes = self._sizes(source)
        if shape[0] in sizes:
            return 0
        return 1 if len(shape) == 2 and shape[0] == 1 and shape[1] in sizes else None

    def rows(self, source: int) -> int:
        """Rows of a source's embedding, its adapter's where that brings one; 0 without an embedding."""
        pair = self._resolver.sources[source].pair
        found = self._resolver.stored(source, pair.embedding) if pair is not None else None
        return found[1].shape[0] if found is not None else 0

    def is_doubtful(self, source: int, name: str) -> bool:
        """Whether a tensor counts tokens by its name, and nothing tells which on what axis.

        It is transposed, say, or has as many rows as the config says beside ``vocab_size``.
        """
        model = self._resolver.sources[source]
        shape = model.checkpoint.tensors[name].shape
        if model.pair is None or not self._is_named_so(source, name) or self.axis(source, name) is not None:
            return False
        fields = text_section(model.checkpoint.config).items()
        others = {value for key, value in fields if "vocab" in key and type(value) is int and value > 1}
        return not (self._sizes(source) | others).isdisjoint(shape)

    def _sizes(self, source: int) -> set[int]:
        """Rows of a source's own embedding and head."""
        tensors, pair = self._resolver.sources[source].checkpoint.tensors, self._resolver.sources[source].pair
        names = (pair.embedding, pair.head) if pair is not None else ()
        return {tensors[name].shape[0] for name in names if name in tensors and tensors[name].shape}

    def _is_named_so(self, source: int, name: str) -> bool:
        info = self._resolver.logical[source].infos[name]
        tensors = self._resolver.sources[source].checkpoint.tensors
        return counts_tokens(name, info) or _is_bare_bias(name, info, tensors)


def counts_tokens(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is, by its name, an embedding of tokens or a head, be it in a layer that predicts
    further tokens.
    """
    return info.part in (Role.EMBEDDING, Role.HEAD) and _BY_POSITION.isdisjoint(name.split("."))


def _is_bare_bias(name: str, info: TensorInfo, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a bias outside layers and of no matrix of its own, as BART's of the logits."""
    is_loose = info.is_bias and info.role is Role.OTHER and info.layer is None
    return is_loose and f"{name.removesuffix('bias')}weight" not in tensors
