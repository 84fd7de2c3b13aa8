"""What calibrating takes: memory, time, and what it gains.

    python tests/benchmarks/calibration.py layer [--place DIRECTORY] [--tokens 4096] [--memory 12GiB]

``layer``: a model of one layer as DeepSeek-V3's, 7168 wide with 256 experts in FP8, random codes, is
calibrated (``raymerge calibrate --inline``) on as many tokens of random words. Prints the largest memory of
that process, and tokens per second; 12 GB of disk, some minutes.

    python tests/benchmarks/calibration.py fisher
    python tests/benchmarks/calibration.py regmean [--cut halves|pieces|written]

``fisher``, ``regmean``: what merges by Fisher information, by RegMean and RegMean++ lose on held-out text,
and the plain mean; half an hour. ``--cut``: whether a half of a text is one of its two halves, or every
second piece of some 2,000 characters; or whether models are calibrated on text that they write themselves,
and judged on the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.held_out_texts import measure_fisher, measure_regmean
from benchmarks.measure import machine
from kits.checkpoint_maker import write_json
from kits.deepseek_headers import V3_CONFIG, deepseek_v3_specs
from kits.tokenizer_maker import CHATML_CONFIG, word_level, write_tokenizer

from raymerge.checkpoints.header import StoredTensor, lay_out
from raymerge.dtypes import DType

_VOCAB, _LENGTH = 1024, 512
_ONE_LAYER = {
    **V3_CONFIG,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "vocab_size": _VOCAB,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
_NOISE_NBYTES = 64 << 20


def _numbers(tensor: StoredTensor, chance: np.random.Generator) -> bytes:
    count = tensor.nbytes // tensor.dtype.nbytes(1)
    if tensor.dtype is DType.F32:
        value = 2e-4 if tensor.name.endswith("scale_inv") else 0.0
        return np.full(count, value, dtype=np.float32).tobytes()
    if "norm" in tensor.name:
        return torch.ones(count, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    values = chance.standard_normal(count, dtype=np.float32) * 0.02
    return torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().tobytes()


def _write_model(root: Path) -> None:
    root.mkdir(parents=True)
    chance = np.random.default_rng(0)
    layout = lay_out([spec for file in deepseek_v3_specs(_ONE_LAYER) for spec in file])
    # No code of it is NaN.
    noise = (chance.integers(0, 256, _NOISE_NBYTES, dtype=np.uint8) & 0xF7).tobytes()
    with open(root / "model.safetensors", "wb") as stream:
        stream.write(layout.header)
        for number, tensor in enumerate(sorted(layout.tensors, key=lambda each: each.offset)):
            if tensor.dtype is not DType.F8_E4M3:
                stream.write(_numbers(tensor, chance))
                continue
            first = number * 4099 % (_NOISE_NBYTES // 2)
            for begin in range(0, tensor.nbytes, _NOISE_NBYTES // 2):
                stream.write(noise[first : first + min(_NOISE_NBYTES // 2, tensor.nbytes - begin)])
    write_json(root / "config.json", _ONE_LAYER)
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, _VOCAB))]
    write_tokenizer(root, word_level(words, added=["<s>", "</s>"]), CHATML_CONFIG)


def _layer(place: Path, tokens: int, memory: str) -> None:
    _write_model(place / "model")
    words = np.random.default_rng(1).integers(3, _VOCAB, tokens * 2)
    (place / "text.txt").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    given = ["--texts", str(place / "text.txt"), "--length", str(_LENGTH), "--inline", "--device", "cpu"]
    # The first of a window is no token of the text.
    given += ["--tokens", str(tokens // _LENGTH * (_LENGTH - 1)), "--memory", memory]
    command = [sys.executable, "-m", "raymerge.cli", "calibrate", str(place / "model"), *given]
    began = time.monotonic()
    subprocess.run([*command, "-o", str(place / "statistics")], check=True)
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, busy = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    report = json.loads((place / "statistics" / "raymerge" / "stage.json").read_bytes())["report"]
    count = sum(text["tokens"] for text in report["texts"])
    print(f"{count} tokens in {seconds:.0f} s, {count / seconds:.1f} tokens/s, start and texts included")
    print(f"{busy:.0f} s of one core, {count / busy:.1f} tokens/s of it")
    print(f"largest memory {peak / 1e9:.1f} GB with --memory {memory}; {machine()}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    layer = parts.add_parser("layer")
    layer.add_argument("--place", type=Path, default=None)
    layer.add_argument("--tokens", type=int, default=4096)
    layer.add_argument("--memory", default="12GiB")
    parts.add_parser("fisher")
    parts.add_parser("regmean").add_argument(
        "--cut", choices=("halves", "pieces", "written"), default="halves"
    )
    asked = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if asked.part == "fisher":
        measure_fisher()
        return 0
    if asked.part == "regmean":
        measure_regmean(asked.cut)
        return 0
    with tempfile.TemporaryDirectory(dir=asked.place) as place:
        _layer(Path(place), asked.tokens, asked.memory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
