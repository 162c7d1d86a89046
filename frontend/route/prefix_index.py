"""Which core has which KV blocks: what cores report, and what requests on their way will leave there. Pure.

A core whose model keeps states may go on from less of a prefix than it has blocks of, as it keeps the states behind
few of them (`state_slots`).

Cores are small numbers; sets of them are the bits of an integer, so a prompt is looked up once for all cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PrefixIndex:
    """The names (`ipc.block_names`) of the blocks of each core."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._stored: dict[int, set[bytes]] = {}
        self._expected: dict[int, Counter[bytes]] = {}

    def store(self, core: int, names: Iterable[bytes]) -> None:
        """Record that a core has blocks."""
        stored = self._stored.setdefault(core, set())
        for name in names:
            stored.add(name)
            self._holders[name] = self._holders.get(name, 0) | 1 << core

    def remove(self, core: int, names: Iterable[bytes]) -> None:
        """Record that a core no longer has blocks; unknown ones are ignored."""
        stored = self._stored.get(core, set())
        for name in names:
            if name in stored:
                stored.remove(name)
                self._update(core, name)

    def expect(self, core: int, names: Iterable[bytes]) -> None:
        """Record that a request was sent to a core which will have these blocks, until `unexpect`."""
        expected, holders, bit = self._expected.setdefault(core, Counter()), self._holders, 1 << core
        for name in names:
            expected[name] = expected.get(name, 0) + 1
            holders[name] = holders.get(name, 0) | bit

    def unexpect(self, core: int, names: Iterable[bytes]) -> None:
        """Take back an `expect`; after a `forget` this does nothing."""
        expected = self._expected.get(core, Counter())
        for name in names:
            if expected[name] > 1:
                expected[name] -= 1
            else:
                del expected[name]
                self._update(core, name)

    def reset(self, core: int) -> None:
        """Forget what a core has reported: it begins anew."""
        for name in self._stored.pop(core, set()):
            self._update(core, name)

    def forget(self, core: int) -> None:
        """Forget everything about a core: it is gone."""
        expected = self._expected.pop(core, Counter())
        self.reset(core)
        for name in expected:
            self._update(core, name)

    def num_names(self, core: int) -> int:
        """How many blocks a core has reported."""
        return len(self._stored.get(core, ()))

    def depths(self, names: Sequence[bytes], cores: Iterable[int]) -> dict[int, int]:
        """By core, how many of the first blocks of a prompt it has without a gap."""
        depths = {core: len(names) for core in cores}
        alive = sum(1 << core for core in depths)
        holders = self._holders
        for depth, name in enumerate(names):
            left = alive & holders.get(name, 0)
            if left != alive:
                for core in depths:
                    if (alive & ~left) >> core & 1:
                        depths[core] = depth
                alive = left
                if not alive:
                    break
        return depths

    def _update(self, core: int, name: bytes) -> None:
        """Take a core from the holders of a name, unless it has reported or will have the block."""
        if name in self._stored.get(core, ()) or self._expected.get(core, Counter())[name]:
            return
        if holders := self._holders.get(name, 0) & ~(1 << core):
            self._holders[name] = holders
        else:
            self._holders.pop(name, None)
