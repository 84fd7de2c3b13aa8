"""Named rules for files of a model's repository that are no part of a merge; plans show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class FileRule:
    name: str
    files: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()

    def matches(self, key: str) -> bool:
        *directories, name = key.split("/")
        in_directory = any(_any(each, self.directories) for each in directories)
        return in_directory or _any(name, self.files)

    def patterns(self) -> Iterator[str]:
        """The rule as patterns of whole keys, as the Hub's client takes them."""
        for name in self.files:
            yield from (name, f"*/{name}")
        for directory in self.directories:
            yield from (f"{directory}/*", f"*/{directory}/*")


HIDDEN = FileRule("hidden", files=(".*",), directories=(".*",))
TRAINING = FileRule(
    "training state",
    files=(
        *("optimizer*", "scheduler*", "rng_state*", "random_states*", "scaler.pt", "trainer_state.json"),
        *("training_args.bin", "*.distcp"),
    ),
    directories=("checkpoint-[0-9]*", "global_step[0-9]*", "pytorch_model_fsdp*"),
)
ORIGINAL = FileRule(
    "original release",
    files=("consolidated*.safetensors", "consolidated*.pth", "consolidated*.pt", "consolidated*.index.json"),
    directories=("original", "metal"),
)
EXPORT = FileRule(
    "export for other software",
    files=(
        *("*.gguf", "*.ggml", "*.llamafile", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.tflite"),
        *(
            "*.mlmodel",
            "*.engine",
            "*.nemo",
            "*.pdparams",
            "*.keras",
            "*.ot",
            "tf_model*.h5*",
            "flax_model*.msgpack*",
        ),
        *("openvino_*.bin", "openvino_*.xml"),
    ),
    directories=("onnx", "openvino", "coreml", "tflite", "gguf", "*.mlpackage", "*.mlmodelc"),
)
VARIANT = FileRule(
    "variant in another precision",
    files=(
        *("model.fp[0-9]*.safetensors*", "model.bf16*.safetensors*", "model-*.fp[0-9]*.safetensors"),
        "diffusion_pytorch_model.fp[0-9]*.safetensors*",
    ),
)
BY_NAME = (HIDDEN, TRAINING, ORIGINAL, EXPORT, VARIANT)
"""Rules that need only a file's name; the first match counts."""

NOT_FETCHED = tuple(pattern for rule in (TRAINING, ORIGINAL, EXPORT, VARIANT) for pattern in rule.patterns())


def rule_of(key: str) -> FileRule | None:
    return next((rule for rule in BY_NAME if rule.matches(key)), None)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
