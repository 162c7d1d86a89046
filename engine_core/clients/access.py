"""Which peers may attach as frontends, and what each of them may do.

Over `ipc://` a peer is `uid:NUMBER`, its user id; with CURVE `curve:NAME`, after the file of its certificate; over
TCP without keys, which is open to every user of this machine, `tcp`. Certificates and rights are read again when
their files change, so a withdrawn certificate admits no frontend, and ends those that it has admitted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pagewire.ipc.host.gate import Peer
from pagewire.ipc.host.owned import check_folder, open_owned, read_owned, trusted_users
from pagewire.ipc.wire.calls import Right

logger = logging.getLogger("pagewire.core")

ALL = frozenset(Right)
DEFAULT = "default"  # in a file of rights: the entry for peers that have none
MAX_RIGHTS_BYTES = 256 << 10  # thousands of peers
T = TypeVar("T")


class Watched(Generic[T]):
    """A value read from a file, or from the files of a folder, which `refresh` reads again if one has changed.

    path: of the file or folder. read: reads it. fallback: the value while it cannot be read later on; None keeps
        the last value.

    Raises:
        ValueError, OSError: it cannot be read at first.

    Attributes:
        value: as last read.
    """

    def __init__(self, path: Path, read: Callable[[Path], T], fallback: T | None = None) -> None:
        self._path, self._read, self._fallback = path, read, fallback
        self._state = state_of(path)
        self.value = read(path)

    def refresh(self) -> None:
        """Read the value again if a file has changed. May be called on any thread."""
        if (state := state_of(self._path)) == self._state:
            return
        try:
            self.value = self._read(self._path)
        except (ValueError, OSError) as error:
            logger.error("cannot read %s again: %s", self._path, error)
            self.value = self.value if self._fallback is None else self._fallback
        self._state = state


def state_of(path: Path) -> list[tuple[str, int, int, int]]:
    """What changes when a file, or any file of a folder, is changed: names, inodes, sizes and times."""
    try:
        paths = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        infos = [(str(path), path.stat()) for path in paths]
    except OSError:
        return []
    return [(name, info.st_ino, info.st_size, info.st_mtime_ns) for name, info in infos]


def read_certificates(folder: Path) -> dict[bytes, str]:
    """The names of the frontends whose certificates (NAME.key) are in a folder, by their public keys (Z85).

    Raises:
        PermissionError: other users can change the folder, so they could let themselves in.
        OSError: it does not exist.
    """
    from zmq.auth import load_certificate

    check_folder(folder)
    names = {}
    for path in sorted(folder.glob("*.key")):
        try:
            os.close(open_owned(path.resolve()))
            names[load_certificate(path)[0]] = path.stem
        except (ValueError, OSError) as error:
            logger.error("ignored the certificate %s: %s", path, error)
    return names


def read_rights(path: Path) -> dict[str, frozenset[Right]]:
    """The rights in a YAML file: lists of `Right`s by peer (uid:1000, curve:NAME, tcp) or for "default".

    Raises:
        ValueError: it holds something else. PermissionError: other users can change it. OSError: it cannot be read.
    """
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
        table = yaml.load(read_owned(path.resolve(), MAX_RIGHTS_BYTES), loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(table, dict):
        raise ValueError(
            f"{path} must hold a mapping of peers (uid:1000, curve:NAME, tcp, default) to rights"
        )
    return {str(peer): parsed_rights(path, peer, rights) for peer, rights in table.items()}


def parsed_rights(path: Path, peer: Any, rights: Any) -> frozenset[Right]:
    """The rights of one entry of a file of rights.

    Raises:
        ValueError: no peer, or no list of rights.
    """
    kind, _, name = str(peer).partition(":")
    if not (peer in (DEFAULT, "tcp") or (kind == "curve" and name) or (kind == "uid" and name.isdecimal())):
        raise ValueError(f"{path}: a peer is uid:NUMBER, curve:NAME, tcp or default, not {peer!r}")
    known = ", ".join(right.value for right in Right)
    try:
        return frozenset(Right(right) for right in rights or [])
    except (ValueError, TypeError):
        raise ValueError(f"{path}: the rights of {peer} must be a list of {known}, not {rights!r}") from None


def may_name_paths(peer: str, rights: frozenset[Right]) -> bool:
    """True for a peer that could read the core's files itself and may control it: it may make workers read them."""
    return Right.CONTROL in rights and peer in {f"uid:{user}" for user in trusted_users()}


class Access:
    """Decides about peers.

    allowed_users: ids of users who may attach over ipc beside the core's own and root.
    certificates: folder of the public certificates of allowed frontends.
    rights: file of rights; without it every peer that may attach may do everything.

    Raises:
        ValueError, OSError: the folder or the file cannot be used; the text says why.
    """

    def __init__(
        self,
        allowed_users: Iterable[int] = (),
        certificates: Path | None = None,
        rights: Path | None = None,
    ) -> None:
        self._users = trusted_users() | frozenset(allowed_users)
        no_certificates: dict[bytes, str] = {}
        self._names = (
            None if certificates is None else Watched(certificates, read_certificates, no_certificates)
        )
        self._rights: Watched[Mapping[str, frozenset[Right]]] | None = (
            None if rights is None else Watched(rights, read_rights)
        )

    def admit(self, peer: Peer) -> str:
        """The name of a peer that may attach, which messages of its connection carry. Called on the gate's thread.

        Raises:
            PermissionError: it may not.
        """
        self.refresh()
        if peer.key is not None:
            if (name := ({} if self._names is None else self._names.value).get(peer.key)) is None:
                raise PermissionError(f"{peer.host} has a CURVE key of which there is no certificate here")
            name = f"curve:{name}"
        elif peer.user is None:
            name = "tcp"
        elif peer.user in self._users:
            name = f"uid:{peer.user}"
        else:
            raise PermissionError(f"user {peer.user} may not attach; --allow-uid {peer.user} would let it")
        if not self.rights(name):
            raise PermissionError(f"{name} has no rights in the file of rights")
        return name

    def refresh(self) -> None:
        """Read certificates and rights again if they have changed."""
        for watched in (self._names, self._rights):
            if watched is not None:
                watched.refresh()

    def rights(self, name: str) -> frozenset[Right]:
        """What a peer may do now; nothing if its certificate has been withdrawn. name: given by `admit`."""
        certificates = {} if self._names is None else self._names.value
        if name.startswith("curve:") and name.removeprefix("curve:") not in certificates.values():
            return frozenset()
        if self._rights is None:
            return ALL
        table = self._rights.value
        return table.get(name, table.get(DEFAULT, frozenset()))
