"""A GPU's model on the host while its worker sleeps: a description, and copies of its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import psutil
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.device.interface import Device
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.single import shards_of
from pagewire.workers.weight_cache.forms import NotStoredError, describe, restored

logger = logging.getLogger("pagewire.worker")


def on_host(
    loaded: LoadedModel, device: Device, collective: Collective, parallel: Parallel
) -> Callable[[], LoadedModel] | None:
    """Copy a model to the host; what is returned makes the same model of the copies, on its device.

    None, if the device is the host, if something in the model has no form (`forms.py`), or if the host has too
    little memory: then the weights are read from their files again.
    """
    if not device.asynchronous:
        return None
    try:
        tensors: list[Tensor] = []
        description = describe(loaded, tensors, collective)
    except NotStoredError as error:
        logger.info("weights are read again after a sleep: %s", error)
        return None
    if sum(tensor.nbytes for tensor in distinct(tensors)) > psutil.virtual_memory().available:
        logger.info("weights are read again after a sleep: the host has too little memory for them")
        return None
    copies = {id(tensor): tensor.to("cpu", copy=True) for tensor in distinct(tensors)}
    order = [id(tensor) for tensor in shared(tensors)]
    ranks = {"all": collective, "shards": shards_of(collective, parallel)}

    def back() -> LoadedModel:
        own = {key: copy.to(device.torch_device, copy=True) for key, copy in copies.items()}
        model = restored(description, [own[key] for key in order], ranks)
        assert isinstance(model, LoadedModel), "it was described as one"
        return model

    return back


def shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of those with the same memory always the first: tied weights stay tied."""
    first: dict[object, Tensor] = {}
    return [
        first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), tensor)
        for tensor in tensors
    ]


def distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of them that have memory of their own."""
    return list({id(tensor): tensor for tensor in shared(tensors)}.values())
