"""The cores of a router that come and go: reached side by side, checked to be replicas, left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from pagewire.frontend.client import Supervisor
from pagewire.frontend.route.replica import CorePlace, Replica, ReplicaListener, ReplicaState
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.wire.messages import EngineInfo

logger = logging.getLogger("pagewire.route")

RETRY_SECONDS = 1.0  # between two attempts to reach a core for the first time
ADD_SECONDS = 10.0  # for a core that is added to be reached, before the answer is that it is joining

# What replicas have in common. Sizes of memory may differ.
EQUAL = (
    "model",
    "architecture",
    "dtype",
    "figures",
    "vocab_size",
    "max_model_len",
    "block_size",
    "tokenizer",
    "tokenizer_revision",
    "tokenizer_mode",
    "skip_tokenizer_init",
    "eos_token_id",
    "generation_config",
    "max_logprobs",
    "scheduling_policy",
    "served_model_names",
    "pooling",
    "lora",
    "embeddings",
    "logits_processors",
)


class Members:
    """The cores, by number.

    listener: gets what happens on their connections. on_up: called, with the lock, when a core was reached.

    Attributes:
        lock: guards the states of all. info: properties of the first core that was reached.
        dead: why no core is up; None while one is.
    """

    def __init__(self, listener: ReplicaListener, on_up: Callable[[Replica], None]) -> None:
        self.lock = threading.RLock()
        self.dead: EngineDeadError | None = EngineDeadError("no engine core was reached yet")
        self.info: EngineInfo | None = None
        self._listener, self._on_up = listener, on_up
        self._replicas: dict[int, Replica] = {}
        self._num_added = 0
        self._closing = threading.Event()

    def __iter__(self) -> Iterator[Replica]:
        with self.lock:
            return iter([self._replicas[number] for number in sorted(self._replicas)])

    def get(self, number: int) -> Replica:
        """The core with a number.

        Raises:
            ValueError: there is none.
        """
        if (replica := self._replicas.get(number)) is None:
            raise ValueError(f"there is no core {number}")
        return replica

    def up(self) -> list[Replica]:
        """The cores that get requests."""
        return [replica for replica in self if replica.state is ReplicaState.UP]

    def attached(self) -> list[Replica]:
        """The cores that answer calls."""
        return [replica for replica in self if replica.state in (ReplicaState.UP, ReplicaState.DRAINING)]

    def start(self, places: Sequence[CorePlace]) -> EngineInfo:
        """Attach to all cores at once. Those that do not answer yet are tried again, as long as one does.

        Raises:
            EngineDeadError: none answers. ValueError: two are no replicas. And as `CoreSource.connect`.
        """
        attempts = [self._join(place) for place in places]
        for _, tried in attempts:
            tried.wait()
        problems = [(replica, replica.problem) for replica, _ in attempts if replica.problem is not None]
        for replica, problem in problems:
            if not (isinstance(problem, EngineDeadError) and replica.place.retries):
                raise problem
        if self.info is None:
            raise problems[0][1]
        return self.info

    def add(self, place: CorePlace) -> Replica:
        """Attach to one more core. Returns it, up or, if that takes longer, joining.

        Raises:
            ValueError: it is no replica of the others. EngineDeadError: nothing answers there. And as
            `CoreSource.connect`.
        """
        replica, tried = self._join(place)
        if tried.wait(ADD_SECONDS) and replica.problem is not None:
            self.leave(replica)
            raise replica.problem
        return replica

    def leave(self, replica: Replica) -> None:
        """Detach from a core, for good; one that was spawned here is stopped. Not on a thread of its connection."""
        self.give_up(replica)
        if replica.connection is not None:
            replica.connection.close()
            logger.info("core %d (%s) was left", replica.number, replica.place.label)

    def give_up(self, replica: Replica) -> None:
        """Remove a core from those of the router."""
        with self.lock:
            replica.state = ReplicaState.GONE
            self._replicas.pop(replica.number, None)

    def close(self) -> None:
        """Leave all, side by side."""
        self._closing.set()
        threads = [threading.Thread(target=self.leave, args=(replica,)) for replica in self]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _join(self, place: CorePlace) -> tuple[Replica, threading.Event]:
        """Attach to a core on a thread of its own. Returns the core, and what is set after the first attempt."""
        with self.lock:
            replica = Replica(self._num_added, place, self._listener)
            self._replicas[replica.number] = replica
            self._num_added += 1
        tried = threading.Event()
        name = f"pagewire-join-{replica.number}"
        threading.Thread(target=self._reach, args=(replica, tried), name=name, daemon=True).start()
        return replica, tried

    def _reach(self, replica: Replica, tried: threading.Event) -> None:
        """Attach to a core, if need be again and again."""
        while not self._closing.is_set() and replica.state is ReplicaState.JOINING:
            try:
                self._welcome(replica, replica.connect())
            except Exception as error:  # of any kind: `start` and `add` report it
                replica.problem = error
                if not (isinstance(error, EngineDeadError) and replica.place.retries):
                    self.give_up(replica)
                if not tried.is_set():
                    logger.warning("core %d was not reached: %s", replica.number, error)
            tried.set()
            if replica.state is ReplicaState.JOINING:
                self._closing.wait(RETRY_SECONDS)

    def _welcome(self, replica: Replica, connection: Supervisor) -> None:
        """Take a core that was reached.

        Raises:
            ValueError: it is no replica of the others. EngineDeadError: it is not wanted any more.
        """
        try:
            with self.lock:
                self.info = self.info or connection.info
                check_same(self.info, connection.info, replica.place.label)
                if self._closing.is_set() or replica.state is not ReplicaState.JOINING:
                    raise EngineDeadError("the engine was shut down")
                replica.connection = connection
                replica.state, replica.problem = ReplicaState.LOST, connection.dead
                if connection.dead is None:
                    self._on_up(replica)
        except BaseException:
            connection.close()
            raise
        logger.info("core %d is %s", replica.number, replica.place.label)


def differences(first: EngineInfo, second: EngineInfo) -> dict[str, tuple[object, object]]:
    """The properties in which two engines differ that replicas must share: by name, both values."""
    kinds = [info.device.partition(":")[0] for info in (first, second)]
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(first, name), getattr(second, name)) for name in EQUAL
    }
    pairs["device"] = (kinds[0], kinds[1])
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def check_same(first: EngineInfo, second: EngineInfo, label: str) -> None:
    """Check that an engine is a replica of the first one: a request prepared for one gives the same tokens on both.

    label: its address, for the error.

    Raises:
        ValueError: it is not; the text names what differs.
    """
    if different := differences(first, second):
        text = "; ".join(f"{name} is {other!r}, not {one!r}" for name, (one, other) in different.items())
        raise ValueError(f"the core at {label} is no replica of the others: {text:.2000}")
