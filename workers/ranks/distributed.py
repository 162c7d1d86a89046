"""Collectives through torch.distributed: gloo on CPUs, NCCL on GPUs.

Sums are not left to the library, whose order depends on size and topology: each rank gets the others' elements and
adds them up in the order of the ranks. Large tensors go in two exchanges, in which a rank adds up its share only.
All is sent as bytes, so every dtype is.
"""

from __future__ import annotations

import copy
import os
import socket
from collections import deque
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.cpu.collective import ordered_sum
from pagewire.workers.errors import LoadError
from pagewire.workers.ranks import meeting
from pagewire.workers.ranks.introduction import own_address

NO_LIMIT = timedelta(days=30)  # the core's limits end a wait, see `interface`
SHARED_BYTES = 1 << 16  # from this size on, each rank adds up a share
SENT_AHEAD = 2  # tensors that may be on their way to a rank


class DistributedGroup:
    """The ranks of a group as a process group of torch.distributed; a `Collective`.

    backend: "gloo" or "nccl". device: of the tensors. listener: where rank 0 listens, if the ranks are on several
        machines.

    Raises:
        LoadError: no network interface has this machine's address. OSError, RuntimeError: the ranks cannot meet.
    """

    def __init__(
        self, backend: str, device: torch.device, parallel: Parallel, listener: socket.socket | None = None
    ) -> None:
        self.rank, self.size = parallel.rank, parallel.size
        self.device = device
        store = open_store(parallel, listener)
        address = "127.0.0.1" if not parallel.host else own_address(parallel.host, parallel.port)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface_of(address))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(parallel.rendezvous, store),  # type: ignore[attr-defined, unused-ignore]
            rank=parallel.rank,
            world_size=parallel.size,
            timeout=NO_LIMIT,
            device_id=device if backend == "nccl" else None,
        )
        self._group: Any = None  # of all ranks
        self._parts: dict[int, DistributedGroup] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()  # on their way, with the memory that they need

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        x = x.contiguous()
        if self.size == 2 or x.nbytes < SHARED_BYTES:
            return ordered_sum(self._gathered(x))
        padding = -x.numel() % self.size
        flat = torch.cat([x.view(-1), x.new_zeros(padding)]) if padding else x.view(-1)
        shares = torch.empty_like(flat)
        dist.all_to_all_single(as_bytes(shares), as_bytes(flat), group=self._group)
        share = ordered_sum(shares.view(self.size, -1).unbind(0))
        return torch.cat(self._gathered(share))[: x.numel()].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`."""
        return torch.cat(self._gathered(x.contiguous()), dim=-1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`."""
        if not x.is_contiguous():
            raise ValueError("a tensor that takes the values of another rank is contiguous")
        dist.broadcast(as_bytes(x), group=self._group, group_src=source)
        return x

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self._gathered(torch.zeros(1, dtype=torch.uint8, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def part(self, size: int) -> DistributedGroup:
        """See `Collective.part`."""
        if size not in self._parts:
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, self.size, size)]
            part = self._parts[size] = copy.copy(self)
            part.rank, part.size = self.rank % size, size
            part._group, part._parts, part._sent = groups[self.rank // size], {}, deque()
        return self._parts[size]

    def send(self, x: Tensor, target: int) -> None:
        """See `Collective.send`."""
        x = x.contiguous()
        while len(self._sent) >= SENT_AHEAD:
            self._sent.popleft()[0].wait()
        self._sent.append((dist.isend(as_bytes(x), group=self._group, group_dst=target), x))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.receive`."""
        if not x.is_contiguous():
            raise ValueError("a tensor that takes the values of another rank is contiguous")
        dist.recv(as_bytes(x), group=self._group, group_src=source)
        return x

    def close(self) -> None:
        """End the process group."""
        while self._sent:
            self._sent.popleft()[0].wait()
        dist.destroy_process_group(self._group)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """All ranks' `x`, in their order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(x), group=self._group)
        return parts


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)


def open_store(parallel: Parallel, listener: socket.socket | None) -> Any:
    """The store through which the ranks find each other. That of rank 0 serves the others.

    It listens at loopback where all ranks are on one machine.
    """
    serves = parallel.rank == 0
    host, port = parallel.host, parallel.port
    if not host:
        host, listener, port = local_address(parallel)
    descriptor = None
    if serves and listener is not None:
        listener.listen(parallel.size)
        descriptor = listener.detach()
    return dist.TCPStore(  # type: ignore[attr-defined, unused-ignore]
        host, port, parallel.size, serves, NO_LIMIT, wait_for_workers=False, master_listen_fd=descriptor
    )


def local_address(parallel: Parallel) -> tuple[str, socket.socket | None, int]:
    """The address at loopback under which the ranks of one machine meet, and, in rank 0, the socket there."""
    host = "127.0.0.1"
    if parallel.rank:
        return host, None, int(meeting.visit(parallel.rendezvous)[0])
    listener = socket.create_server((host, 0), backlog=parallel.size)
    port = listener.getsockname()[1]
    meeting.host(parallel.rendezvous, parallel.size - 1, str(port))
    return host, listener, port


def interface_of(address: str) -> str:
    """The name of the network interface with an address.

    Raises:
        LoadError: no interface of this machine has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(other.address.partition("%")[0] == address for other in addresses):
            return name
    raise LoadError(
        f"no network interface of this machine has the address {address}: set PAGEWIRE_HOST_IP to its own"
    )
