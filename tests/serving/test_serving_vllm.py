"""What vLLM takes weights from, against stand-ins of what it publishes: ``WeightSource``, ``ParamMeta`` of
``vllm.distributed.weight_transfer.base``; ``BaseModelLoader``, ``register_model_loader`` of its loaders."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.merges import make_models, mean_of

import raymerge
from raymerge.errors import CheckpointError, OptionError, PlanError, TargetError, VerificationError
from raymerge.serving import vllm as adapter

INLINE = raymerge.RunOptions(inline=True)


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[BaseModelLoader]]:
    """vLLM as far as it is published, and the loaders that are registered with it."""
    known: dict[str, type[BaseModelLoader]] = {}

    def register_model_loader(load_format: str) -> Callable[[type[BaseModelLoader]], type[BaseModelLoader]]:
        def registered(loader: type[BaseModelLoader]) -> type[BaseModelLoader]:
            if not issubclass(loader, BaseModelLoader):
                raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
            known[load_format] = loader
            return loader

        return registered

    modules = {
        "distributed.weight_transfer.base": {"ParamMeta": ParamMeta, "WeightSource": WeightSource},
        "model_executor.model_loader": {"register_model_loader": register_model_loader},
        "model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
    }
    for name, contents in modules.items():
        parts = ["vllm", *name.split(".")]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[".".join(parts)]).update(contents)
    return known


def _engine(source: WeightSource) -> dict[str, torch.Tensor]:
    """A round of a transfer, which trusts that both channels agree, element for element."""
    received = {}
    for meta, (name, tensor) in zip(source.metadata(), source, strict=True):
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
        received[name] = tensor
    return received


class Model(torch.nn.Module):
    """A model of vLLM, which maps names of checkpoints by itself."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = set(names)
        self.received: dict[str, torch.Tensor] = {}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, torch.nn.Parameter()) for name in self.names)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.received = dict(weights)
        return set(self.received)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    make_models(tmp_path)
    return mean_of(tmp_path / "one", tmp_path / "two")


@pytest.mark.usefixtures("loaders")
def test_a_weight_source_sends_the_merge_in_every_round(recipe: dict[str, Any], tmp_path: Path) -> None:
    published = read_tensors(Path(raymerge.submit(recipe, tmp_path / "out", INLINE).output))
    source = adapter.weight_source(raymerge.stream(recipe, INLINE))
    assert isinstance(source, WeightSource)
    for _ in range(2):
        received = _engine(source)
        assert received.keys() == published.keys()
        assert all(torch.equal(received[name], published[name]) for name in published)


def _config(place: Path, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(model=str(place), quantization=None, **more)


def test_a_directory_without_weights_is_loaded(
    loaders: dict[str, type[BaseModelLoader]], recipe: dict[str, Any], tmp_path: Path
) -> None:
    published = Path(raymerge.submit(recipe, tmp_path / "out", INLINE).output)
    adapter.write_directory(recipe, tmp_path / "served")
    files = sorted(path.name for path in (tmp_path / "served").iterdir())
    assert not any("safetensors" in name for name in files)
    for name in set(files) - {"recipe.yml"}:
        assert (tmp_path / "served" / name).read_bytes() == (published / name).read_bytes()
    adapter.register()
    loader = loaders["raymerge"](SimpleNamespace(model_loader_extra_config={"memory": "64MiB", "threads": 1}))
    expected = read_tensors(published)
    model, config = Model(expected), _config(tmp_path / "served")
    loader.download_model(config)
    loader.load_weights(model, config)
    assert model.received.keys() == expected.keys()
    assert all(torch.equal(model.received[name], expected[name]) for name in expected)
    with pytest.raises(VerificationError, match=r"1 parameters .* extra\.weight"):
        loader.load_weights(Model([*expected, "extra.weight"]), config)


def test_what_is_wrong_with_a_directory_is_refused(
    loaders: dict[str, type[BaseModelLoader]],
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"one: it is a path from the current directory"):
        adapter.write_directory(mean_of("one", tmp_path / "two"), tmp_path / "served")
    with pytest.raises(TargetError, match="something here already"):
        adapter.write_directory(recipe, tmp_path / "one")
    adapter.register()
    plain = loaders["raymerge"](SimpleNamespace(model_loader_extra_config={}))
    with pytest.raises(CheckpointError, match="no recipe in this directory"):
        plain.download_model(_config(tmp_path / "one"))
    adapter.write_directory(recipe, tmp_path / "served")
    for extra, what in (({"memories": 1}, "memories is not one of memory"), ({"memory": "4 G"}, "memory: ")):
        odd = loaders["raymerge"](SimpleNamespace(model_loader_extra_config=extra))
        with pytest.raises(OptionError, match=what):
            odd.download_model(_config(tmp_path / "served"))


def test_the_plug_in_is_declared_and_loads_nothing_by_itself() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (entry,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    assert resolve_name(entry) is adapter.register
    code = "import sys, raymerge.serving.vllm; print({'vllm', 'torch', 'pyarrow'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"
