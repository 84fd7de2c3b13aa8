"""Training checkpoints whose tensors are stored in chunks, several to a tensor.

Three forms: directories of torch's distributed checkpoint (``.metadata`` and ``*.distcp``), Megatron's
``torch_dist``, which is one of these, and ``shard-*-model-*.safetensors`` as torch writes them for the
Hub."""
