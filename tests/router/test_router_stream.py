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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raymerge.errors import PlanError
from raymerge.planner.sources import Source
from raymerge.router.prompts import TokenRun
from raymerge.router.stream_layers import check_streamable, least_stream_budget, stream

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("name", PATHS)
def test_as_in_the_whole_model(tmp_path: Path, name: str) -> None:
    base = make_base(name, tmp_path / "model")
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
    stream(llama, runs, small, device=CPU, budget=0, spill=tmp_path / "small")
    assert set(watched) == {sum(LENGTHS) * 32 * 4}
    assert not list((tmp_path / "small").iterdir())
    assert all(torch.equal(small.hidden[place], state) for place, state in large.hidden.items())


def test_the_file_is_gone_after_a_failure(llama: Source, tmp_path: Path) -> None:
    class Failing(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        stream(llama, token_runs(3), Failing(), device=CPU, budget=0, spill=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_visitor_may_change_what_it_is_shown(llama: Source, tmp_path: Path) -> None:
    class Spoiling(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            super().layer(layer, run, hidden, router_input)
            hidden.zero_()
            router_input.zero_()

    spoiling, runs = Spoiling(), token_runs(6)
    stream(llama, runs, spoiling, device=CPU, budget=BIG, spill=tmp_path)
    plain = streamed(llama, runs, tmp_path)
    assert all(torch.equal(spoiling.hidden[place], state) for place, state in plain.hidden.items())


def test_bytes_read_are_those_of_layers_and_used_rows(llama: Source, tmp_path: Path) -> None:
    tensors = llama.checkpoint.tensors
    layers = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers." in name)
    norm = tensors["model.norm.weight"].nbytes
    runs = [TokenRun(0, 1, (7, 8, 7)), TokenRun(0, 1, (9,))]
    read = stream(llama, runs, Collector(), device=CPU, budget=BIG, spill=tmp_path)
    assert read == layers + norm + 3 * 32 * 4


def test_nothing_is_read_for_no_runs(llama: Source, tmp_path: Path) -> None:
    assert stream(llama, [], Collector(), device=CPU, budget=BIG, spill=tmp_path) == 0


def test_settings_of_torch_are_put_back(llama: Source, tmp_path: Path) -> None:
    cudnn, within = torch.backends.cudnn, []
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic

    class Looking(Collector):
        def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
            within.append((torch.get_float32_matmul_precision(), cudnn.allow_tf32, torch.is_grad_enabled()))

    torch.set_float32_matmul_precision("high")
    try:
        stream(llama, token_runs(2), Looking(), device=CPU, budget=BIG, spill=tmp_path)
        assert set(within) == {("highest", False, False)}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before[0])
    assert (cudnn.allow_tf32, cudnn.deterministic) == before[1:]
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


def test_experts_of_published_layouts(tmp_path: Path) -> None:
    """Mixtral as published has three matrices an expert under names of its own; transformers stacks them."""
    base = make_base("mixtral", tmp_path / "model")
    assert any("experts.0.w1" in name for name in base.checkpoint.tensors)
    check_streamable(base)


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
from raymerge.router.stream_layers import least_stream_budget, stream

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
stream(open_base(small), runs[:1], Nothing(), device=device, budget=0, spill=spill)
base = open_base(large)
least = least_stream_budget(base, 100)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
stream(base, runs, Nothing(), device=device, budget=least, spill=spill)
print(json.dumps({"least": least, "grown": status("VmHWM") - before}))
"""


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
    assert layer < least_stream_budget(llama, 4) < least_stream_budget(llama, 64)
    wide = make_base("llama", tmp_path / "wide", intermediate_size=96)
    assert least_stream_budget(wide, 4) > least_stream_budget(llama, 4)


# What is refused, before anything is read


def refusal(base: Source) -> str:
    """Why a base is not streamed."""
    with pytest.raises(PlanError) as caught:
        check_streamable(base)
    assert all(problem.where == base.name and problem.remedy for problem in caught.value.problems)
    return str(caught.value)


def altered(
    llama: Source, root: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any
) -> Source:
    """The llama with other tensors or fields of its config."""
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    merged = {**llama.checkpoint.config, **config}
    return open_base(write_checkpoint(root, tensors if tensors is not None else state, merged))


def test_a_family_that_transformers_does_not_know(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "new", model_type="nimbus")
    assert "says model_type 'nimbus', which the installed transformers does not know." in refusal(base)
    base = altered(llama, tmp_path / "own", model_type="nimbus", auto_map={"AutoConfig": "nimbus.Config"})
    assert "does not know; its own code (auto_map) is not run" in refusal(base)


def test_code_beside_a_known_family_is_not_run(llama: Source, tmp_path: Path) -> None:
    own = {"AutoModelForCausalLM": "modeling_own.Model", "AutoConfig": "modeling_own.Config"}
    check_streamable(altered(llama, tmp_path / "own", auto_map=own))


def test_a_config_that_cannot_be_built(llama: Source, tmp_path: Path) -> None:
    said = refusal(altered(llama, tmp_path / "model", num_attention_heads="four"))
    assert "transformers cannot build LlamaForCausalLM of its config" in said


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    tensors = {"shared.weight": torch.randn(64, 32)}
    config = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}
    said = refusal(open_base(write_checkpoint(tmp_path / "t5", tensors, {**config, **sizes})))
    assert "is an encoder with a decoder" in said
    assert "no model for causal language of the kind t5" in said


def test_quantised_tensors(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = torch.ones(1, 1)
    base = altered(llama, tmp_path / "fp8", state, quantization_config={"quant_method": "fp8"})
    assert "holds tensors that are quantised" in refusal(base)


def test_tensors_that_are_not_there_or_of_another_shape(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    for layer in range(3):
        del state[f"model.layers.{layer}.mlp.up_proj.weight"]
        state[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.ones(5, 32)
    said = refusal(altered(llama, tmp_path / "holes", state))
    assert (
        "6 tensors of LlamaForCausalLM are not in it by name and shape: model.layers.0.mlp.gate_proj" in said
    )
    assert "save_pretrained" in said


def test_another_number_of_layers_than_the_config_says(llama: Source, tmp_path: Path) -> None:
    assert "model.layers.3." in refusal(altered(llama, tmp_path / "four", num_hidden_layers=4))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba", "layers without a feed-forward network in whose place experts could come: 0, 1, 2."),
        ("bamba", "cannot be run layer by layer: it fails with ValueError"),
        ("rwkv", "cannot be run layer by layer"),
        ("falcon_h1", "nothing says how to compute its buffers layer 0: mamba.mup_vector"),
    ],
)
def test_families_whose_layers_are_no_chain(tmp_path: Path, name: str, why: str) -> None:
    assert why in refusal(make_base(name, tmp_path / "model"))


def test_a_file_of_tensors_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    assert "it has no model_type" in refusal(open_base(path))


def test_a_check_reads_no_weights_and_needs_none(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    check_streamable(base)
    assert least_stream_budget(base, 5) > 0


def test_the_oracle_is_not_blind(llama: Source, tmp_path: Path) -> None:
    """A changed weight of one layer is seen behind it and not before."""
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"] += 1.0
    runs = token_runs(5)
    seen = streamed(altered(llama, tmp_path / "model", state), runs, tmp_path)
    plain = streamed(llama, runs, tmp_path)
    assert [torch.equal(seen.hidden[n, 0], plain.hidden[n, 0]) for n in range(3)] == [True, True, False]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        states = loaded(torch.tensor([runs[0].tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen.hidden[2, 0], states[2][0], rtol=1e-5, atol=1e-5)
