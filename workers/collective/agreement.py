"""What the ranks of a group decide together, so that all of them take the same way."""

from __future__ import annotations

import torch

from pagewire.workers.collective.interface import Collective


def all_have(it: bool, collective: Collective, device: torch.device) -> bool:
    """True if all ranks of a group have something. device: of the group's tensors."""
    lacking = torch.tensor([float(not it)], device=device)
    return not collective.all_reduce(lacking).item()
