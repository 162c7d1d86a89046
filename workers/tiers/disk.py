"""A worker's cold tiers: KV blocks and states in swap space, on disk and of other cores, as the core says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pagewire.ipc.errors import error_text
from pagewire.ipc.wire.tier_messages import NOT_IN_MEMORY, BlockOut, MoveBlocks, TierConfig, TierReport
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.device.interface import Device
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.device.machine import machine_memory
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.tiers.folder import TierFolder
from pagewire.workers.tiers.identity import identity_of
from pagewire.workers.tiers.memory import TierMemory
from pagewire.workers.tiers.mover import BlockMover
from pagewire.workers.tiers.no_folder import NoFolder
from pagewire.workers.tiers.swap import NoSwap, SwapMemory, open_swap
from pagewire.workers.weight_cache.key import reason_unknown

logger = logging.getLogger("pagewire.worker")


class DiskTier:
    """Moves blocks between the KV memory of a worker and swap space, a folder and other cores.

    Its methods are for the thread that runs steps.

    memory: called for that of all layers: sleep takes and gives it.
    """

    def __init__(
        self, memory: Callable[[], TierMemory], mover: BlockMover, swap: SwapMemory | None = None
    ) -> None:
        self._memory, self._mover = memory, mover
        self._swap = NoSwap() if swap is None else swap

    @property
    def swap_size(self) -> CacheSize:
        """The places in the swap space, for blocks and for states."""
        return self._swap.size

    def move(self, message: MoveBlocks) -> None:
        """Copy blocks out, and begin to read others; what was launched before is over."""
        if message.lend:
            in_memory = [block for block in message.lend if block.block_id != NOT_IN_MEMORY]
            copies = {block.name: pieces for block, pieces in self._copied(in_memory)}
            self._mover.lend(message.number, message.lend, copies)
            return
        memory = self._memory()
        sizes = [memory.of(block).block_bytes for block in message.out]
        accepted = message.out[: self._mover.num_accepted(sizes)]
        for block, pieces in self._copied(accepted):
            self._mover.write(block, pieces)
        if message.swap_out:
            self._swap.copy_out(message.swap_out, memory)
        if message.back and message.entries.data:
            self._mover.take(message.number, message.back, message.entries.data, memory)
        elif message.back or message.swap_back:
            restore = self._swap.copy_back(message.swap_back, memory) if message.swap_back else None
            self._mover.read(message.number, message.back, memory, restore)
        elif message.number:
            self._mover.answer(message.number)

    def _copied(self, blocks: Sequence[BlockOut]) -> Iterator[tuple[BlockOut, list[memoryview]]]:
        """Copies of blocks in memory, each in pieces."""
        for is_state in (False, True):
            if out := [block for block in blocks if block.is_state is is_state]:
                copies = self._memory().of(out[0]).copy_out([block.block_id for block in out])
                yield from zip(out, copies, strict=True)

    def forget(self) -> None:
        """Remove all blocks of this model and layout."""
        self._mover.clear()

    def let_go(self) -> None:
        """Give back what the swap space takes of the memory that sleep gives back."""
        self._swap.let_go()

    def take_reports(self) -> Sequence[TierReport]:
        """What has happened since the last call."""
        return self._mover.take_reports()

    def close(self) -> None:
        """End the thread that moves blocks."""
        self._mover.close()


def open_disk_tier(
    config: WorkerConfig,
    tier: TierConfig,
    loaded: LoadedModel,
    device: Device,
    memory: Callable[[], TierMemory],
    wake: Callable[[], None],
) -> DiskTier:
    """The tiers of a model that is loaded. memory: see `DiskTier`. wake: called by a thread when it has reports.

    Raises:
        LoadError: the model's blocks cannot be kept, or not in this folder; the text says why.
    """
    outlives = bool(tier.folder or tier.lends)
    why = reason_against_tier(config, loaded, device) if outlives else reason_against_copies(config, loaded)
    if why is not None:
        name = "kv_cache_dir" if tier.folder else "kv_peers" if tier.lends else "swap_space"
        raise LoadError(f"{name}: {why} leave the option out")
    host_bytes, _ = machine_memory(config.parallel.local_size)
    swap = open_swap(tier.swap_bytes, host_bytes, device, memory())
    if tier.swap_bytes:
        logger.info("swap space: %d KV blocks, %d states", *swap.size)
    folder = open_folder(config, tier, loaded, memory()) if tier.folder else NoFolder()
    mover = BlockMover(folder, wake)
    if tier.lends:
        threading.Thread(
            target=identify, args=(mover, config, loaded), name="tier-identity", daemon=True
        ).start()
    return DiskTier(memory, mover, swap)


def open_folder(
    config: WorkerConfig, tier: TierConfig, loaded: LoadedModel, memory: TierMemory
) -> TierFolder:
    """The folder of a model's blocks.

    Raises:
        LoadError: it cannot be used, or holds too little.
    """
    block_bytes, state_bytes = memory.blocks.block_bytes, memory.state_bytes
    try:
        identity = identity_of(config, loaded.kv_shapes, loaded.state_shapes)
        size = config.parallel.size
        folder = TierFolder(Path(tier.folder), identity, tier.num_bytes, block_bytes, size, state_bytes)
    except OSError as error:
        raise LoadError(f"kv_cache_dir: {tier.folder} cannot be used: {error_text(error)}") from error
    except ValueError as error:
        raise LoadError(f"kv_cache_disk: {error}") from error
    logger.info("KV blocks on disk: %d in %s", len(folder), tier.folder)
    return folder


def identify(mover: BlockMover, config: WorkerConfig, loaded: LoadedModel) -> None:
    """Say which model and layout blocks for other cores are of: in a thread, since all weights are read for it."""
    try:
        mover.identify(identity_of(config, loaded.kv_shapes, loaded.state_shapes, anywhere=True))
    except OSError as error:
        logger.warning("kv_peers: no blocks go to other cores, or come from them: %s", error_text(error))


def reason_against_tier(config: WorkerConfig, loaded: LoadedModel, device: Device) -> str | None:
    """Why the blocks of a model do not outlive its worker, up to the advice to do without; None if they do."""
    if device.asynchronous:
        return "blocks of a GPU's memory go to its swap_space alone yet;"
    if (why := reason_against_copies(config, loaded)) is not None:
        return why
    if (why := reason_unknown(config)) is not None:
        return f"nobody can tell whether another engine has the same model, since {why};"
    return None


def reason_against_copies(config: WorkerConfig, loaded: LoadedModel) -> str | None:
    """Why the blocks of a model do not leave its KV memory, up to the advice to do without; None if they do."""
    if loaded.model.encodes or not loaded.kv_shapes:
        return "this model keeps no keys and values of earlier tokens;"
    if loaded.state_shapes and config.parallel.stages > 1:
        return "this model keeps states, and not every stage of the pipeline has some;"
    if loaded.source is not None:
        return "what an encoder-decoder's encoder reads cannot be kept elsewhere yet;"
    if config.media:  # the blocks of one that could not be encoded have a name, too
        advice = "set limit_mm_per_prompt to 0 for each kind, or"
        return f"blocks of pictures and sounds cannot be kept elsewhere yet; {advice}"
    return None
