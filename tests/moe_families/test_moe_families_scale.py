"""Qwen3-235B-A22B's true headers, twice: 36,945 tensors planned by role, within memory and none forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import sparse_checkpoint

from raymerge.checkpoints.header import TensorSpec, shard_names
from raymerge.dtypes import DType

pytestmark = pytest.mark.slow

NUM_TENSORS = 36_945
"""Tensors of Qwen3-235B-A22B."""
NBYTES = 470_187_269_120
"""Bytes of their data in bfloat16."""
NUM_FILES = 118
"""Files that it was published in."""
MOST_BYTES = 1_000_000_000
"""Peak memory of a planning process."""
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""``config.json`` of Qwen3-235B-A22B, as far as a merge looks at it."""

CHILD = """
import json, sys, time
def peak():
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
from collections import Counter
from raymerge.api import plan
began = time.perf_counter(), time.process_time()
plan = plan(json.loads(sys.argv[1]))
seconds = time.perf_counter() - began[0], time.process_time() - began[1]
table = plan["dispositions"]
fates = zip(table.column("source").to_pylist(), table.column("disposition").to_pylist())
print(json.dumps({
    "seconds": seconds,
    "peak": peak(),
    "problems": [str(problem) for problem in plan.problems],
    "fates": sorted([source, fate, count] for (source, fate), count in Counter(fates).items()),
    "distinct": len(set(zip(table.column("source").to_pylist(), table.column("name").to_pylist()))),
    "tensors": len(plan["tensors"]),
    "nbytes": sum(plan["tensors"].column("nbytes").to_pylist()),
    "methods": sorted({expression.method for expression in plan.expressions}),
    "notes": plan.manifest["notes"],
}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints whose data is a hole."""
    root = tmp_path_factory.mktemp("qwen3")
    specs = list(_tensors())
    assert len(specs) == NUM_TENSORS
    size = -(-len(specs) // NUM_FILES)
    files = [specs[start : start + size] for start in range(0, len(specs), size)]
    names = shard_names(len(files))
    one, two = (sparse_checkpoint(root / name, files, CONFIG, names=names) for name in ("one", "two"))
    return one, two


def test_roles_from_two_parents(models: tuple[Path, Path]) -> None:
    """Experts along the arc, routers of the second, norms of the first, the mean of the rest."""
    one, two = map(str, models)
    recipe = {
        "merge_method": "linear",
        "base_model": one,
        "models": [{"model": path, "parameters": {"weight": 0.5}} for path in (one, two)],
        "methods": [
            {"role": "expert", "merge_method": "slerp", "parameters": {"t": 0.6}},
            {"role": "norm", "merge_method": "passthrough", "sources": [one]},
        ],
        "router": two,
    }
    report = _report(recipe)
    assert report["problems"] == []
    assert (report["tensors"], report["nbytes"]) == (NUM_TENSORS, NBYTES)
    assert report["distinct"] == 2 * NUM_TENSORS
    norms, routers = 4 * 94 + 1, 94
    merged = NUM_TENSORS - norms - routers
    assert report["fates"] == [
        [0, "copied", norms],
        [0, "dropped", routers],
        [0, "merged", merged],
        [1, "copied", routers],
        [1, "dropped", norms],
        [1, "merged", merged],
    ]
    assert report["methods"] == ["copy", "linear", "slerp"]
    assert f"routers and their biases are those of {two} (router: {two})" in report["notes"]
    assert report["peak"] < MOST_BYTES


def _report(recipe: Mapping[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    wall, busy = report["seconds"]
    print(f"planned in {wall:.1f} s ({busy:.1f} s of one core), peak {report['peak'] / 1e9:.2f} GB")
    return report


def _tensors() -> Iterator[TensorSpec]:
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield _spec("model.embed_tokens", vocab, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        yield from _layer(f"model.layers.{layer}", hidden)
    yield _spec("model.norm", hidden)
    yield _spec("lm_head", vocab, hidden)


def _layer(block: str, hidden: int) -> Iterator[TensorSpec]:
    head, width = CONFIG["head_dim"], CONFIG["moe_intermediate_size"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _spec(f"{block}.{name}", hidden)
    for name in ("q_norm", "k_norm"):
        yield _spec(f"{block}.self_attn.{name}", head)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield _spec(f"{block}.self_attn.{name}", rows, hidden)
    yield _spec(f"{block}.self_attn.o_proj", hidden, queries)
    yield _spec(f"{block}.mlp.gate", CONFIG["num_experts"], hidden)
    for expert in range(CONFIG["num_experts"]):
        path = f"{block}.mlp.experts.{expert}"
        yield _spec(f"{path}.gate_proj", width, hidden)
        yield _spec(f"{path}.up_proj", width, hidden)
        yield _spec(f"{path}.down_proj", hidden, width)


def _spec(module: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{module}.weight", DType.BF16, shape)
