"""A core whose workers keep states beside KV: streams, metrics, and a new worker that has less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagewire.ipc.wire.messages import CoreDying
from tests.engine_core.test_core import roll_out

PROMPT = list(range(1, 41))


def test_streams_go_on_from_checkpoints(start_core: Callable) -> None:
    """Also of a second worker, whose states are its own."""
    frontend = start_core(worker_options=["--num-states", "24"]).frontend()
    assert frontend.attach().info.num_states == 24
    for key in range(6):
        frontend.submit(key, [*PROMPT, key], max_tokens=40)
    while sum(map(len, frontend.outputs.values())) < 20:
        frontend.take(frontend.hear())
    frontend.kill_worker()
    frontend.finish(*[(key, 0) for key in range(6)])
    for key in range(6):
        assert frontend.outputs[key, 0] == roll_out([*PROMPT, key], 40)
    turn = [*PROMPT, 0, *frontend.outputs[0, 0], 5]
    frontend.submit(9, turn, max_tokens=2)
    frontend.finish((9, 0))
    assert frontend.ends[9, 0].num_cached_tokens == 80 and frontend.outputs[9, 0] == roll_out(turn, 2)
    status = frontend.status()
    assert (status["worker_starts"], status["num_states"], status["num_free_states"]) == (2, 24, 24)
    values = {
        (row["name"], *(row["labels"].get(label) for label in ("use", "event"))): row["value"]
        for row in frontend.call("metrics").result
        if row["name"].startswith("pagewire:state_")
    }
    uses = [values["pagewire:state_slots", use, None] for use in ("running", "checkpoint", "free")]
    assert uses[0] == 0 and uses[1] > 1 and sum(uses) == 24
    made, hit, evicted = (
        values["pagewire:state_checkpoints_total", None, event] for event in ("made", "hit", "evicted")
    )
    assert made >= 8 and hit >= 5 and evicted < made


def test_a_new_worker_with_fewer_state_slots_ends_the_core(start_core: Callable, tmp_path: Path) -> None:
    core = start_core(worker_options=["--num-states", "8", "--lose-states", str(tmp_path / "lose")])
    frontend = core.frontend()
    frontend.attach()
    (tmp_path / "lose").touch()
    frontend.kill_worker()
    dying = frontend.hear()
    assert isinstance(dying, CoreDying) and "the new worker has only 4 state slots" in dying.cause
    core.thread.join(20)
