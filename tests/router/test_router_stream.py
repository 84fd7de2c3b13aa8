"""Streaming layer by layer: the same numbers as the whole model, one layer in memory, refusals beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import write_checkpoint
from kits.layer_streams import BIG, KINDS, Collector, make_base, open_base, streamed, token_runs, whole
from kits.model_parents import save
from safetensors.torch import load_file

from raymerge.planner.inputs.sources import Source
from raymerge.stages.router.prompts import TokenRun
from raymerge.stages.router.streamed import LayerStream
from raymerge.stages.router.streamed_model import StreamedModel

LENGTHS = (9, 5, 9, 13)
CPU = torch.device("cpu")
MIB = 1 << 20
PATHS = {
    "llama": "mlp",
    "mistral": "mlp",
    "qwen2": "mlp",
    "qwen3": "mlp",
    "gemma2": "mlp",
    "gemma3_text": "mlp",
    "gpt_neox": "mlp",
    "gpt2": "mlp",
    "falcon": "mlp",
    "phi3": "mlp",
    "bloom": "mlp",
    "mixtral": "mlp",
    "qwen3_moe": "mlp",
    "deepseek_v3": "mlp",
    "granitemoehybrid": "block_sparse_moe",
    "llama4_text": "feed_forward",
    "opt": "fc1",
}
"""Families, and where in a layer the feed-forward network is: windows, two kinds of masks, positions of every
kind, parallel layers, layers that answer with tuples, experts by file and fused, a network that has no module
of its own."""
CONFIGS = {"granitemoehybrid": {"layer_types": ["attention"] * 3}}
"""What a family's config says else."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("name", PATHS)
def test_as_in_the_whole_model(tmp_path: Path, name: str) -> None:
    base = make_base(name, tmp_path / "model", **CONFIGS.get(name, {}))
    runs = token_runs(*LENGTHS)
    seen = streamed(base, runs, tmp_path / "spill")
    hidden, router_input = whole(name, tmp_path / "model", runs, PATHS[name])
    assert seen.hidden.keys() == hidden.keys()
    for place, expected in hidden.items():
        torch.testing.assert_close(seen.hidden[place], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(seen.router_input[place], router_input[place], rtol=1e-5, atol=1e-5)
        assert not torch.equal(seen.router_input[place], seen.hidden[place])


def test_runs_come_in_order_layer_after_layer(llama: Source, tmp_path: Path) -> None:
    seen = streamed(llama, token_runs(4, 2), tmp_path)
    assert seen.order == [(layer, run) for layer in range(3) for run in range(2)]
    for states in (seen.hidden, seen.router_input):
        assert all(state.dtype == torch.float32 for state in states.values())
        assert states[2, 0].shape == (4, 32)
        assert states[2, 1].shape == (2, 32)


@settings(deadline=None, max_examples=6)
@given(order=st.permutations(range(4)), count=st.integers(1, 4))
def test_nothing_depends_on_the_other_runs(
    llama: Source, tmp_path_factory: pytest.TempPathFactory, order: list[int], count: int
) -> None:
    runs = token_runs(*LENGTHS)
    every = streamed(llama, runs, tmp_path_factory.getbasetemp())
    some = streamed(llama, [runs[n] for n in order[:count]], tmp_path_factory.getbasetemp())
    for place, run in enumerate(order[:count]):
        for layer in range(3):
            assert torch.equal(some.hidden[layer, place], every.hidden[layer, run])
            assert torch.equal(some.router_input[layer, place], every.router_input[layer, run])


def test_a_small_budget_changes_nothing_and_leaves_no_file(llama: Source, tmp_path: Path) -> None:
    runs = token_runs(*LENGTHS)
    large = streamed(llama, runs, tmp_path / "large", budget=BIG)
    assert not (tmp_path / "large").exists()
    watched: list[int] = []

    class Watching(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            watched.extend(path.stat().st_size for path in (tmp_path / "small").iterdir())
            super().layer(layer, run, hidden, router_input)

    small = Watching()
    LayerStream(llama).read(runs, small.layer, device=CPU, budget=0, spill=tmp_path / "small")
    assert set(watched) == {sum(LENGTHS) * 32 * 4}
    assert not list((tmp_path / "small").iterdir())
    assert all(torch.equal(small.hidden[place], state) for place, state in large.hidden.items())


def test_bytes_read_are_those_of_layers_and_used_rows(llama: Source, tmp_path: Path) -> None:
    tensors = llama.checkpoint.tensors
    layers = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers." in name)
    norm = tensors["model.norm.weight"].nbytes
    runs = [TokenRun(0, 1, (7, 8, 7)), TokenRun(0, 1, (9,))]
    read = LayerStream(llama).read(runs, Collector().layer, device=CPU, budget=BIG, spill=tmp_path)
    assert read == layers + norm + 3 * 32 * 4


def test_settings_of_torch_are_put_back(llama: Source, tmp_path: Path) -> None:
    cudnn, within = torch.backends.cudnn, []
    before = cudnn.deterministic

    class Looking(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            within.append((cudnn.deterministic, torch.is_grad_enabled()))

    LayerStream(llama).read(token_runs(2), Looking().layer, device=CPU, budget=BIG, spill=tmp_path)
    assert set(within) == {(True, False)}
    assert cudnn.deterministic == before
    assert torch.is_grad_enabled()


def test_bfloat16_weights_are_computed_with_in_float32(tmp_path: Path) -> None:
    save(KINDS["llama"].build(1).to(torch.bfloat16), tmp_path / "model")
    runs = token_runs(8)
    seen = streamed(open_base(tmp_path / "model"), runs, tmp_path)
    hidden, _ = whole("llama", tmp_path / "model", runs, "mlp")
    for place, expected in hidden.items():
        torch.testing.assert_close(seen.hidden[place], expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_the_bare_model(tmp_path: Path) -> None:
    model: Any = KINDS["llama"].build(1)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "bare")
    runs = token_runs(6, 4)
    bare = open_base(tmp_path / "bare")
    assert "layers.0.mlp.up_proj.weight" in bare.checkpoint.tensors
    seen, expected = (streamed(each, runs, tmp_path) for each in (bare, open_base(tmp_path / "whole")))
    assert all(torch.equal(seen.hidden[place], state) for place, state in expected.hidden.items())


def test_an_adapter_over_the_base_counts(tmp_path: Path) -> None:
    model = KINDS["llama"].build(1)
    save(model, tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    tiny_lora(tmp_path / "adapter", state, 3)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in state:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in factors:
            state[name] += 2 * factors[f"{path}.lora_B.weight"] @ factors[f"{path}.lora_A.weight"]
    model.load_state_dict(state, strict=False)
    save(model, tmp_path / "merged")
    runs = token_runs(6, 4)
    seen = streamed(open_base(f"{tmp_path / 'model'}+{tmp_path / 'adapter'}"), runs, tmp_path)
    plain = streamed(open_base(tmp_path / "model"), runs, tmp_path)
    expected = streamed(open_base(tmp_path / "merged"), runs, tmp_path)
    assert not torch.equal(seen.hidden[2, 0], plain.hidden[2, 0])
    for place, state_there in expected.hidden.items():
        torch.testing.assert_close(seen.hidden[place], state_there, rtol=1e-5, atol=1e-5)


MODEL = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SCRIPT = """
import json, sys
import torch
from kits.layer_streams import open_base, token_runs
from raymerge.stages.router.streamed import LayerStream

class Nothing:
    def layer(self, layer, run, hidden, router_input):
        pass

def status(word):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))

torch.set_num_threads(1)
small, large, spill = sys.argv[1:]
runs = token_runs(*[100] * 16)
device = torch.device("cpu")
# What is imported on the way is not what is measured.
LayerStream(open_base(small)).read(runs[:1], Nothing().layer, device=device, budget=0, spill=spill)
base = open_base(large)
least = LayerStream(base).least_budget(100)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
LayerStream(base).read(runs, Nothing().layer, device=device, budget=least, spill=spill)
print(json.dumps({"least": least, "grown": status("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_a_model_larger_than_the_limit(llama: Source, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**KINDS["llama"].config, **MODEL}
    nbytes = _write_large(tmp_path / "large", sizes)
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            llama.checkpoint.root,
            str(tmp_path / "large"),
            str(tmp_path / "spill"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(ran.stdout.splitlines()[-1])
    assert measured["least"] < nbytes // 3
    # Memory that the allocator holds on to is the process's as well.
    assert measured["grown"] <= measured["least"] + 16 * MIB


def _write_large(root: Path, config: dict[str, Any]) -> int:
    """A checkpoint with layers of the config's sizes; returns its bytes in float32."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (config["num_attention_heads"] * config["head_dim"], hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, config["num_attention_heads"] * config["head_dim"]),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.full(shape, 0.01)
    write_checkpoint(
        root,
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    )
    return 4 * sum(tensor.numel() for tensor in tensors.values())


def test_the_least_budget_grows_with_the_run_and_the_layer(llama: Source, tmp_path: Path) -> None:
    layer = sum(t.num_elements for name, t in llama.checkpoint.tensors.items() if ".layers.0." in name) * 4
    assert layer < LayerStream(llama).least_budget(4) < LayerStream(llama).least_budget(64)
    wide = make_base("llama", tmp_path / "wide", intermediate_size=96)
    assert LayerStream(wide).least_budget(4) > LayerStream(llama).least_budget(4)


# What is kept of it


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each hollow model that is built."""
    found: list[int] = []
    build = StreamedModel.__init__

    def counted(self: StreamedModel, *args: Any) -> None:
        found.append(len(found))
        build(self, *args)

    monkeypatch.setattr(StreamedModel, "__init__", counted)
    return found


def test_a_hollow_model_is_not_used_after_a_failure(llama: Source, tmp_path: Path, built: list[int]) -> None:
    class Failing(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            raise RuntimeError("enough")

    layers, runs = LayerStream(llama), token_runs(5)
    with pytest.raises(RuntimeError, match="enough"):
        layers.read(runs, Failing().layer, device=CPU, budget=BIG, spill=tmp_path)
    seen = Collector()
    layers.read(runs, seen.layer, device=CPU, budget=BIG, spill=tmp_path)
    assert len(built) == 2
    assert torch.equal(seen.hidden[2, 0], streamed(llama, runs, tmp_path).hidden[2, 0])
