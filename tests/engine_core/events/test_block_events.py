"""What a core says of its blocks: to frontends that follow them, and to those that do not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.events.block_events import NAMES_AT_ONCE, BlockEvents, snapshot
from pagewire.engine_core.schedule.blocks import BlockPool
from pagewire.ipc.wire.block_names import prompt_names, split_names
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Blocks, CallAnswer, Deltas
from tests.engine_core.conftest import RawFrontend, RunningCore

SIZE = 16


class Mirror:
    """What a frontend knows of blocks, from the messages that it gets."""

    def __init__(self, frontend: RawFrontend) -> None:
        self.frontend, self.names, self.next, self.ended = frontend, set[bytes](), 0, set[int]()
        frontend.begin_call(99, "follow_blocks")

    def read(self, until: Callable[[], bool]) -> None:
        """Take messages until a condition holds."""
        while not until():
            message = self.frontend.hear()
            if isinstance(message, Blocks):
                assert message.number == self.next
                self.next += 1
                self.names = set() if message.reset else self.names
                self.names -= set(split_names(message.removed))
                self.names |= set(split_names(message.stored))
            elif isinstance(message, CallAnswer):
                assert message.result is True, message
            else:
                assert isinstance(message, Deltas)
                self.ended |= {delta.key for delta in message if delta.finish_reason is not None}


def test_a_frontend_that_follows_knows_the_blocks_of_prompts(start_core: Callable[..., RunningCore]) -> None:
    core = start_core(max_model_len=1024)
    frontend = core.frontend()
    frontend.attach()
    first = Mirror(frontend)
    prompts = [[kind] * 50 for kind in range(1, 4)]
    expected = {name for prompt in prompts for name in prompt_names(Prompt(prompt), SIZE)}
    for key, prompt in enumerate(prompts):
        frontend.submit(key, prompt, max_tokens=1)
    first.read(lambda: first.names >= expected)
    assert first.names == expected

    later = core.frontend("later")
    later.attach()
    second = Mirror(later)
    second.read(lambda: second.next > 0)
    assert second.names == expected  # the snapshot

    frontend.submit(9, [7] * 1015, max_tokens=1)  # its blocks take the place of others
    of_long = set(prompt_names(Prompt([7] * 1015), SIZE))
    for mirror in (first, second):
        mirror.read(lambda mirror=mirror: mirror.names >= of_long and not mirror.names & expected)

    first.read(lambda: 9 in first.ended)
    frontend.begin_call(100, "reset_prefix_cache")
    first.read(lambda: not first.names)


def test_without_shared_prefixes_nothing_follows(start_core: Callable[..., RunningCore]) -> None:
    frontend = start_core(enable_prefix_caching=False).frontend()
    frontend.attach()
    assert frontend.call("follow_blocks").result is False


def test_blocks_need_a_right_of_their_own(start_core: Callable[..., RunningCore], tmp_path: Path) -> None:
    file = tmp_path / "rights.yaml"
    file.write_text("default: [read, generate, control]\n")
    file.chmod(0o600)
    frontend = start_core(access=Access(rights=file)).frontend()
    frontend.attach()
    answer = frontend.call("follow_blocks")
    assert answer.error_type == "PermissionError"
    assert "'events'" in str(answer.error)


class Deaf:
    """Clients of which none can be sent anything while `full`."""

    def __init__(self) -> None:
        self.full = False
        self.sent: list[Blocks] = []
        self.attached: dict[bytes, Any] = {b"f": self}
        self.identity = b"f"

    def send(self, identity: bytes, message: Blocks) -> bool:
        """Keep a copy."""
        if not self.full:
            self.sent.append(Blocks(message.number, message.reset, message.stored, message.removed))
        return not self.full


def named(pool: BlockPool, *names: bytes) -> None:
    """Give new blocks these names, and free them."""
    from pagewire.engine_core.schedule.block_changes import Stored

    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        if pool.register(block, name) and pool.changes is not None:
            pool.changes.append(Stored(name, bytes(32), []))
    pool.free(blocks)


def test_a_follower_that_does_not_read_costs_no_memory_and_sees_the_gap() -> None:
    clients, pool = Deaf(), BlockPool(8)
    events = BlockEvents(clients, pool)  # type: ignore[arg-type]
    events.follow(clients)  # type: ignore[arg-type]
    clients.full = True
    for second in range(1, 50):
        named(pool, bytes([second]) * 32)
        events.flush(float(second))
        assert pool.changes == []  # it was for this follower alone
    assert events.wait(100.0) == 0.0  # though nothing has changed
    clients.full = False
    events.flush(100.0)
    assert [(each.number, each.stored) for each in clients.sent] == [(0, b""), (50, b"")]
    assert events.wait(200.0) > 1e9
    events.follow(clients)  # type: ignore[arg-type]
    assert clients.sent[-1].reset
    assert set(split_names(clients.sent[-1].stored)) == set(pool.named)


def test_batches_come_at_intervals_and_recording_ends_with_the_last_follower() -> None:
    clients, pool = Deaf(), BlockPool(8)
    events = BlockEvents(clients, pool)  # type: ignore[arg-type]
    named(pool, b"0" * 32)
    assert pool.changes is None
    events.follow(clients)  # type: ignore[arg-type]
    named(pool, b"1" * 32)
    events.flush(10.0)
    named(pool, b"2" * 32)
    events.flush(10.001)
    assert 0 < events.wait(10.001) < 0.1
    events.flush(10.1)
    assert [each.stored for each in clients.sent] == [b"0" * 32, b"1" * 32, b"2" * 32]
    clients.attached.clear()
    named(pool, b"3" * 32)
    events.flush(11.0)
    assert pool.changes is None
    assert len(clients.sent) == 3


def test_a_snapshot_comes_in_pieces() -> None:
    pool = BlockPool(NAMES_AT_ONCE + 1)
    assert [each.reset for each in snapshot(pool)] == [True]  # also an empty one
    names = [number.to_bytes(32, "big") for number in range(NAMES_AT_ONCE + 1)]
    named(pool, *names)
    pieces = list(snapshot(pool))
    assert [each.reset for each in pieces] == [True, False]
    assert b"".join(each.stored for each in pieces) == b"".join(names)
