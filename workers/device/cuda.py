"""A GPU as a device. It is asynchronous: calls queue work on a stream and return. Graphs replay recorded steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cuda import kernels as cuda_kernels
from pagewire.kernels.cuda.attention import HEAD_DIMS
from pagewire.kernels.cuda.compile import CompileError
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.kv import FP8
from pagewire.kernels.cuda.norms import DTYPES as KERNEL_DTYPES
from pagewire.kernels.cuda.sampling import MAX_VOCAB_SIZE
from pagewire.kernels.cuda.source import Variant
from pagewire.kernels.cuda.variants import Launches, variants_of
from pagewire.workers.device.cpu import CpuTokenSampler
from pagewire.workers.device.cuda_sampler import CudaTokenSampler
from pagewire.workers.device.first_run import SAMPLING, in_processes, replace_wrong_kernels
from pagewire.workers.device.gpu_memory import CONTEXT_BYTES, GpuMemory, attention_scratch, sampling_scratch
from pagewire.workers.device.interface import KernelNeeds, LoadedSizes, TokenSampler
from pagewire.workers.device.kv_size import GIB
from pagewire.workers.device.waits import WaitFinder
from pagewire.workers.errors import LoadError

logger = logging.getLogger("pagewire.worker")

MOST_REASON = 200  # characters of a reason in the log
ALIGNMENT = 256  # bytes between tensors that are copied together


class CudaEvent:
    """A CUDA event. See `interface.Event`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def reached(self) -> bool:
        """See `Event.reached`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Event.wait`."""
        self._event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """See `Event.seconds_since`."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaDevice:
    """One GPU, torch's current device. Methods as in `interface.Device`.

    kernels: those of the device. launcher: launches them.
    """

    asynchronous = True
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    def __init__(self, name: str, kernels: CudaKernels) -> None:
        self.name, self.torch_device = name, torch.device(name)
        self.kernels, self.launcher = kernels, kernels.launcher
        self.num_threads = torch.get_num_threads()
        self._downloads = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graphs = 0
        self._scratch = attention_scratch(self.launcher.multiprocessors)
        self.plan: GpuMemory | None = None
        self._beside_torch = self._used_beside_torch()

    @classmethod
    def open(cls, index: int, batch_invariant: bool = False) -> CudaDevice:
        """Take `cuda:index`. batch_invariant: see `CudaKernels`.

        Raises:
            LoadError: there is no such device, or its kernels cannot be compiled.
        """
        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise LoadError(f"torch {torch.__version__}, built {built}, finds no GPU: see `pagewire doctor`")
        try:
            torch.cuda.set_device(index)
            kernels = cuda_kernels.load(index)
            kernels.batch_invariant = batch_invariant
        except (CompileError, RuntimeError) as error:  # LaunchError is one, as are PyTorch's
            raise LoadError(f"cuda:{index} cannot be used: {error}; see `pagewire doctor`") from error
        return cls(f"cuda:{index}", kernels)

    @property
    def batch_invariant(self) -> bool:
        """See `Device.batch_invariant`."""
        return self.kernels.batch_invariant

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Device.zeros`."""
        try:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise OSError(str(error)) from error

    def populate(self, tensor: Tensor) -> bool:
        """False: a GPU's memory is there when it is allocated."""
        return False

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """See `Device.kv_dtypes`."""
        return (dtype, *FP8) if dtype in KERNEL_DTYPES else (dtype,)

    def prepare(self, needs: KernelNeeds) -> None:
        """See `Device.prepare`."""
        compressed = self.kernels.latents & needs.latents.keys() if needs.dtype in KERNEL_DTYPES else set()
        expanded = {size for sizes, size in needs.latents.items() if sizes not in compressed}
        other = {*needs.head_dims, *expanded} - set(HEAD_DIMS)
        refuse_unserved(self, needs, other, compressed)
        sizes = {*needs.head_dims, *expanded, *(keys for keys, _ in compressed)}
        launched = [
            Launches(
                needs.dtype,
                needs.kv_dtype,
                head_dim,
                needs.encodes,
                needs.recurrent,
                needs.mixture,
                needs.packed,
                self.launcher.capability,
                self.batch_invariant,
                head_dim in {keys for keys, _ in needs.indexed & compressed},
            )
            for head_dim in sorted(sizes) or [0]
        ]
        variants = dict.fromkeys(variant for each in launched for variant in variants_of(each))

        def progress(done: int, total: int, variant: Variant) -> None:
            if done % 8 == 0 or done == total:
                logger.info("kernels for %s: %d of %d", self.name, done, total)

        try:
            self.launcher.load(list(variants), progress)
        except CompileError as error:
            raise LoadError(f"the kernels cannot be compiled: {error}; see `pagewire doctor`") from error
        for each in launched:
            self.try_kernels(each)
        wrong = sorted(self.kernels.replaced - {SAMPLING})
        if self.batch_invariant and wrong:
            raise LoadError(
                f"batch_invariant: kernels of {self.name} differ from PyTorch ({', '.join(wrong)}), and what "
                "PyTorch computes in their place may depend on the batch: leave it out, or use device='cpu'"
            )
        if compressed - self.kernels.latents:  # wrong on this device
            self.prepare(needs)

    def try_kernels(self, launches: Launches) -> None:
        """Let PyTorch compute what the kernels get wrong on this device, which its first run shows."""
        replace_wrong_kernels(self, launches, in_processes)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Device.upload`. All tensors are copied at once, from pinned memory that torch keeps until then."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        host = self.pinned(sum(sizes))
        for part, tensor in zip(host.split_with_sizes(sizes), tensors, strict=True):
            _viewed(part, tensor).copy_(tensor)
        parts = host.to(self.torch_device, non_blocking=True).split_with_sizes(sizes)
        return [_viewed(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def download(self, source: Tensor, target: Tensor) -> CudaEvent:
        """Copy to pinned memory, in parallel with later work, which must not change the source until then."""
        self._downloads.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._downloads):
            target.copy_(source, non_blocking=True)
        return CudaEvent(self._downloads)

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device.pinned`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record_event(self) -> CudaEvent:
        """See `Device.record_event`."""
        return CudaEvent(torch.cuda.current_stream(self.torch_device))

    def sampler(self, max_rows: int, vocab_size: int, max_most_likely: int) -> TokenSampler:
        """See `Device.sampler`."""
        if SAMPLING in self.kernels.replaced:
            return CpuTokenSampler()
        if vocab_size > MAX_VOCAB_SIZE:
            logger.warning(
                "sampling on the CPU: the vocabulary has %d tokens, the GPU's kernels support up to %d",
                vocab_size,
                MAX_VOCAB_SIZE,
            )
            return CpuTokenSampler()
        own = attention_scratch(self.launcher.multiprocessors)
        self._scratch = own + sampling_scratch(max_rows, vocab_size, max_most_likely)
        return CudaTokenSampler(self, max_rows, vocab_size, max_most_likely)

    def can_record(self, dtype: torch.dtype) -> bool:
        """See `Device.can_record`: what PyTorch does in place of kernels waits for the device, but for products."""
        return dtype in KERNEL_DTYPES and self.kernels.replaced <= {SAMPLING, "pack"}

    def why_it_waits(self, work: Callable[[], object]) -> str | None:
        """See `Device.why_it_waits`: by the operations, and by what PyTorch notices itself."""
        try:
            with self._refusing_waits(), WaitFinder():  # type: ignore[no-untyped-call]
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return (str(error).splitlines() or [type(error).__name__])[0][:MOST_REASON]
        return None

    @contextmanager
    def _refusing_waits(self) -> Iterator[None]:
        """A context in which PyTorch raises RuntimeError where it would wait for the device."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Device.record`: a CUDA graph. All graphs until the next `give_back` share one pool of memory."""
        work()  # what is compiled, loaded or taken at first use must not be while a graph is captured
        torch.cuda.synchronize(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()
        self._graphs += torch.cuda.memory_reserved(self.torch_device) - before

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def kv_budget(self, config: WorkerConfig, loaded: LoadedSizes, widest_step: Callable[[], object]) -> int:
        """See `Device.kv_budget`: a fraction of the device's memory, less what this process itself uses.

        That is torch's peak during a step of the largest size, plus what came into use outside of torch since this
        process began. Memory of other processes only counts where it is more than what the fraction leaves.
        """
        self.give_back()
        lasting = self._torch_bytes()
        try:
            activations, error = self._activations_of(widest_step), None
        except torch.OutOfMemoryError as shortage:
            activations, error = 0, shortage
        self.give_back()
        free, total = self._free_and_total()
        context = CONTEXT_BYTES + max(0, self._used_beside_torch() - self._beside_torch)
        self.plan = GpuMemory.shared_out(
            config,
            total=total,
            others=max(0, total - free - self._torch_bytes() - context),
            context=context,
            weights=loaded.weight_bytes,
            tables=max(0, lasting - loaded.weight_bytes - self._scratch),
            scratch=self._scratch,
            activations=activations,
            records=loaded.records,
        )
        if error is not None:
            raise LoadError(
                f"steps of {config.max_num_batched_tokens} tokens (max_num_batched_tokens) do not fit into the "
                f"memory of {self.name} beside the weights. {self.plan.shortage(self.name)}"
            ) from error
        logger.info("memory of %s: %s", self.name, self.plan)
        if self.plan.others > self.plan.reserve:
            logger.warning(
                "%s: other processes hold %.1f GiB, more than gpu_memory_utilization leaves: %.1f GiB are left for "
                "the KV cache",
                self.name,
                self.plan.others / GIB,
                self.plan.kv_cache / GIB,
            )
        return self.plan.kv_cache

    def give_back(self) -> None:
        """See `Device.give_back`."""
        torch.cuda.empty_cache()
        self._pool, self._graphs = None, 0  # a pool whose graphs are all gone takes no other

    def memory(self) -> dict[str, int]:
        """See `Device.memory`; also the parts of its plan, `graphs` as they were recorded."""
        free, total = self._free_and_total()
        parts = {} if self.plan is None else self.plan.parts
        for name in ("weights", "kv_cache"):  # which the runner counts
            parts.pop(name, None)
        process = self._torch_bytes() + parts.get("context", CONTEXT_BYTES)
        return {**parts, "total": total, "available": free, "process": process, "graphs": self._graphs}

    def _activations_of(self, step: Callable[[], object]) -> int:
        """The most bytes that torch takes while a step runs, beside what it held before.

        Raises:
            torch.OutOfMemoryError: there are not so many.
        """
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        lasting = torch.cuda.memory_allocated(self.torch_device)
        step()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - lasting

    def _free_and_total(self) -> tuple[int, int]:
        """Bytes of the device that no process has, and all of it."""
        return torch.cuda.mem_get_info(self.torch_device)

    def _torch_bytes(self) -> int:
        """Bytes that torch has taken for this process."""
        return torch.cuda.memory_reserved(self.torch_device)

    def _used_beside_torch(self) -> int:
        """Bytes in use outside of this process's torch: by other processes, and by other libraries of this one."""
        free, total = self._free_and_total()
        return total - free - self._torch_bytes()


def _viewed(part: Tensor, like: Tensor) -> Tensor:
    """The begin of a part of memory, with the dtype and shape of `like`."""
    numbers = part[: like.nbytes].view(like.dtype)
    return numbers if like.dim() == 1 else numbers.view(like.shape)


def refuse_unserved(
    device: CudaDevice, needs: KernelNeeds, other_heads: Set[int], compressed: Set[tuple[int, int]]
) -> None:
    """Refuse a model that needs more than the kernels have.

    other_heads: sizes of heads without a kernel. compressed: of the model's latents, those with one.

    Raises:
        LoadError: the text says what there is no kernel for.
    """
    name, has_kernels = device.name, needs.dtype in KERNEL_DTYPES
    if other_heads and has_kernels and not needs.encodes:
        raise LoadError(
            f"no kernel on {name} attends with heads of {max(other_heads)} numbers, only with "
            f"{', '.join(map(str, HEAD_DIMS))}: use device='cpu', or dtype='float32', which needs none"
        )
    if has_kernels and (unserved := needs.indexed - compressed):
        served = ", ".join(str(keys) for keys, _ in sorted(device.kernels.latents)) or "none"
        raise LoadError(
            f"no kernel on {name} attends to keys that an indexer chooses among latents of {max(unserved)[0]} "
            f"numbers, only of {served}: use device='cpu', dtype='float32', or a max_model_len up to the number of "
            "keys that it chooses"
        )
    if device.batch_invariant and (not has_kernels or needs.encodes):
        raise LoadError(
            f"batch_invariant: {name} has kernels for decoders in bfloat16 and float16, and none for "
            "encoders or float32: leave it out, or use device='cpu', where no bit depends on the batch"
        )
    if compressed and needs.kv_dtype != needs.dtype:
        raise LoadError(
            f"no kernel on {name} attends to latents in {needs.kv_dtype}: use kv_cache_dtype='auto', "
            f"which takes {max(keys for keys, _ in compressed)} numbers of {needs.dtype} for a token and layer"
        )
