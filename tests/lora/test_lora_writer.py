"""Adapters on their way to disk: whole or not at all, and with a config that peft reads rightly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import peft_merge
from safetensors.torch import load_file

from raymerge.checkpoints.adapters import PREFIX, Adapter
from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import OptionError, TargetError
from raymerge.lora.matrices import Factors
from raymerge.lora.writer import AdapterFacts, AdapterWriter, output_directory, short_targets


def factors(rows: int, columns: int, rank: int, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, columns, generator=generator)
    return Factors(down, torch.randn(rows, rank, generator=generator), 1.0, 1.0)


def written(root: Path, ranks: dict[str, int]) -> Adapter:
    with AdapterWriter(root) as writer:
        for seed, (module, rank) in enumerate(ranks.items()):
            writer.add_factors(module, "linear", factors(4, 5, rank, seed))
        return writer.publish(AdapterFacts("base", tuple(ranks)))


class TestPublishing:
    def test_what_was_added_is_there(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "deep" / "out") as writer:
            writer.add_factors("a.q", "linear", factors(4, 5, 2))
            writer.add_factors("a.e", "embedding", factors(3, 7, 2), DType.BF16)
            spec = TensorSpec(f"{PREFIX}norm.weight", DType.I16, (3,))
            writer.add_bytes(spec, [b"\1\0\2\0", b"\3\0"])
            adapter = writer.publish(AdapterFacts("base", ("q", "e"), ("norm",), task_type="CAUSAL_LM"))
        found = load_file(tmp_path / "deep" / "out" / "adapter_model.safetensors")
        torch.testing.assert_close(found[f"{PREFIX}a.q.lora_A.weight"], factors(4, 5, 2).down)
        assert found[f"{PREFIX}a.e.lora_embedding_B"].dtype is torch.bfloat16
        assert found[f"{PREFIX}norm.weight"].tolist() == [1, 2, 3]
        assert adapter.factors["a.e"].weight_shape == (7, 3)
        assert list(adapter.replaced) == ["norm.weight"]
        assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]
        names = ["adapter_config.json", "adapter_model.safetensors"]
        assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == names

    def test_what_was_dropped_is_not(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "out") as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            writer.add_factors("b", "linear", factors(4, 5, 3))
            writer.drop("a", "linear")
            adapter = writer.publish(AdapterFacts("base", ("b",)))
        assert (list(adapter.factors), adapter.factors["b"].scale) == (["b"], 1.0)

    def test_nothing_is_left_of_what_failed(self, tmp_path: Path) -> None:
        def fail() -> None:
            with AdapterWriter(tmp_path / "out") as writer:
                writer.add_factors("a", "linear", factors(4, 5, 2))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert list(tmp_path.iterdir()) == []

    def test_a_taken_place_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(TargetError, match="this directory is not empty"):
            AdapterWriter(tmp_path)
        with pytest.raises(TargetError, match="a file is in the place"):
            AdapterWriter(tmp_path / "file")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_and_at_the_end(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "out") as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "file").write_text("mine")
            with pytest.raises(TargetError):
                writer.publish(AdapterFacts("base", ("a",)))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestConfig:
    def test_facts(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path) as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            facts = AdapterFacts("org/m", ("a",), ("n",), "SEQ_CLS", True, True, True, True)
            writer.publish(facts)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)
        assert (config["target_modules"], config["modules_to_save"]) == (["a"], ["n"])
        assert (config["base_model_name_or_path"], config["task_type"]) == ("org/m", "SEQ_CLS")
        assert (config["bias"], config["lora_bias"], config["fan_in_fan_out"]) == ("all", True, True)
        assert config["ensure_weight_tying"] is True

    @settings(deadline=None, max_examples=30)
    @given(
        ranks=st.dictionaries(
            st.lists(st.sampled_from(["a", "b", "1", "11"]), min_size=1, max_size=4).map(".".join),
            st.integers(1, 4),
            min_size=1,
            max_size=8,
        )
    )
    def test_every_product_counts_once_whatever_the_paths(
        self, tmp_path_factory: pytest.TempPathFactory, ranks: dict[str, int]
    ) -> None:
        """Paths that end in one another are what patterns could mistake."""
        root = tmp_path_factory.mktemp("adapter") / "out"
        adapter = written(root, ranks)
        assert {module: factor.rank for module, factor in adapter.factors.items()} == ranks
        assert {factor.scale for factor in adapter.factors.values()} == {1.0}
        merged = peft_merge({f"{module}.weight": torch.zeros(4, 5) for module in ranks}, root)
        for seed, (module, rank) in enumerate(ranks.items()):
            made = factors(4, 5, rank, seed)
            torch.testing.assert_close(merged[f"{module}.weight"], (made.up.double() @ made.down.double()))


class TestTargets:
    MODULES = ("m", "m.0", "m.0.q", "m.0.v", "m.1", "m.1.q", "m.1.v", "vision.q2")

    def test_the_last_word_where_it_says_all(self) -> None:
        assert short_targets(["m.0.q", "m.1.q"], self.MODULES) == ("q",)
        assert short_targets(["m.1.v", "m.0.q", "m.1.q", "m.0.v"], self.MODULES) == ("q", "v")

    def test_the_path_where_others_have_the_word(self) -> None:
        assert short_targets(["m.0.q"], self.MODULES) == ("m.0.q",)
        assert short_targets(["m.0.q", "m.0.v", "m.1.v"], self.MODULES) == ("v", "m.0.q")

    def test_a_word_that_names_a_parent_too(self) -> None:
        assert short_targets(["m.0.q"], ["m.0.q", "q"]) == ("m.0.q",)


def test_the_directory_that_is_meant() -> None:
    assert output_directory("file:///data/a%20b") == Path("/data/a b")
    for place in ("s3://bucket/a", "s3:/bucket/a"):
        with pytest.raises(OptionError):
            output_directory(place)
