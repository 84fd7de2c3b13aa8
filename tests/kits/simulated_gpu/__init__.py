"""A GPU that exists in this process alone: what uses CUDA wrongly shows, on a machine without CUDA.

    with simulated_gpu(seed=3) as gpu:
        submit(recipe, output, RunOptions(inline=True, device="cuda"))

Within the block ``torch.cuda`` has one device. Its tensors are a subclass over memory of their own, its
operations are those of torch's CPU build, and they are as late as a GPU's may be:

- An operation is queued on the stream that is current, and carried out later. Streams overtake each other as
  the seed has it, as far as events and waits allow: the host gets ahead, and so does any stream of any other.
- New memory is full of poison (0xCB in every byte). Freed memory is poisoned as soon as the stream that it
  was allocated on has come there, and the streams that ``record_stream`` named.
- Copies from and to pinned memory with ``non_blocking`` read and write the host's bytes when they are carried
  out. All other copies return when they are done, as CUDA's do.
- What needs a value (``item``, ``nonzero``, a mask as an index, decompositions) waits for its stream.
- An operation on tensors of both devices is an error, and so is ``numpy()`` of a tensor of the GPU.
- Memory has an end (``memory_bytes``), and its peak is counted. ``gpu.fault`` makes any operation fail.
- Division by a number is a product with its reciprocal, rounded twice, as in CUDA's kernels.

So a wait that is missing, a buffer that is used again too early or memory that is freed too early is wrong
bytes with some seed out of a few.

What it does not show: CUDA's own rounding (sums, products of matrices, transcendental functions are the
processor's, and bytes are equal to the processor's where a GPU's are close), kernels that CUDA lacks, several
GPUs, processes that share one, and how long anything takes. Memory is poisoned rather than handed out again.
"""

from kits.simulated_gpu.gpu import SimulatedGpu, never
from kits.simulated_gpu.installation import simulated_gpu, without_gpu

__all__ = ["SimulatedGpu", "never", "simulated_gpu", "without_gpu"]
