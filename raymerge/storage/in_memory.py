"""A store of files that are not on a disk: small ones as bytes, large ones as a subclass has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Self

from raymerge.errors import CheckpointError
from raymerge.storage.local.buffers import ALIGNMENT
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.retry import ends_before
from raymerge.storage.store import FileInfo


class MemoryStore:
    """Closing it does nothing: it may be opened any number of times."""

    is_far = False

    def __init__(self, name: str, small: Mapping[str, bytes], large: Iterable[FileInfo]) -> None:
        """``name`` is what messages call it; ``large``: files that ``fill`` gives the bytes of."""
        self._name = name
        self._small = small
        infos = [*(FileInfo(key, len(content), "") for key, content in small.items()), *large]
        self._infos = {each.key: each for each in sorted(infos, key=lambda each: each.key)}

    def fill(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the ``buffer`` with what a large file has from ``offset`` on."""
        raise NotImplementedError

    def location(self, key: str) -> str:
        return self._name if key == "." else f"{self._name}/{key}"

    def files(self) -> tuple[FileInfo, ...]:
        return tuple(self._infos.values())

    def info(self, key: str) -> FileInfo | None:
        return self._infos.get(key)

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return {key: self.info(key) for key in keys}

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        info, end = self.info(key), offset + len(buffer)
        if info is None or end > info.nbytes:
            length = 0 if info is None else info.nbytes
            raise CheckpointError(ends_before(self.location(key), offset, length=len(buffer), nbytes=length))
        if key in self._small:
            buffer[:] = self._small[key][offset:end]
        elif buffer:
            self.fill(key, offset, buffer)

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,  # noqa: ARG002 - it is in memory, or made anew
        like: int | None = None,
    ) -> int:
        begin = (offset if like is None else like) % ALIGNMENT
        self.read_into(key, offset, buffer[begin : begin + nbytes])
        return begin

    def map_extent(
        self,
        key: str,  # noqa: ARG002 - no file can be mapped
        offset: int,  # noqa: ARG002
        nbytes: int,  # noqa: ARG002
        buffer: memoryview,  # noqa: ARG002
        maps: PageMaps,  # noqa: ARG002
    ) -> int | None:
        return None

    def check_expected(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
