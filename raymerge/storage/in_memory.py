"""A store of files that are not on a disk: small ones as bytes, large ones as a subclass has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from raymerge.errors import CheckpointError
from raymerge.storage.retry import ends_before
from raymerge.storage.store import FileInfo, UnmappedStore


class MemoryStore(UnmappedStore):
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

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        info, end = self.info(key), offset + len(buffer)
        if info is None or end > info.nbytes:
            length = 0 if info is None else info.nbytes
            raise CheckpointError(ends_before(self.location(key), offset, length=len(buffer), nbytes=length))
        if key in self._small:
            buffer[:] = self._small[key][offset:end]
        elif buffer:
            self.fill(key, offset, buffer)

    def check_expected(self) -> None: ...

    def close(self) -> None: ...
