"""Files and folders that no other user can change, checked before this process relies on them.

Other users of the machine may put links, files and folders where they may write, such as in /tmp. What is opened
here is the object that was checked: no link is followed, and the open file is examined, not its name.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path


def trusted_users() -> frozenset[int]:
    """The ids of the users whose files and processes this process relies on: its own user, and root."""
    return frozenset({os.geteuid(), 0})


def weakness(info: os.stat_result) -> str | None:
    """Why other users can change a file or folder, as text; None if they cannot."""
    if info.st_uid not in trusted_users():
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if info.st_mode & stat.S_IWGRP and not is_private_group(info.st_uid, info.st_gid):
        return f"group {info.st_gid} may write to it"
    return None


def is_private_group(user_id: int, group_id: int) -> bool:
    """True if a group is the user's own, which has the user's name and no other members.

    Many Linux systems give each user such a group, and let it write to all that the user creates.
    """
    try:
        user, group = pwd.getpwuid(user_id).pw_name, grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def check_folder(folder: Path) -> None:
    """Check that other users can neither replace nor remove this user's files in a folder.

    So the folder belongs to this user or root, and either others may not write there, or (like /tmp) it is sticky:
    then everyone may add files, but only their owners may replace them.

    Raises:
        PermissionError: they can. OSError: the folder does not exist.
    """
    info = folder.stat()
    is_sticky = info.st_mode & stat.S_ISVTX and info.st_uid in trusted_users()
    if not is_sticky and (reason := weakness(info)) is not None:
        raise PermissionError(
            f"{folder} is open to other users ({reason}); use a folder that only you can change, such as a new one "
            "of mode 0700"
        )


def open_owned(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """The descriptor of a regular file that only this user (or root) can change.

    flags, mode: as of `os.open`; a file that is created gets `mode`.

    Raises:
        PermissionError: others can change it; or it is a link or no regular file, or it is opened for writing and
            has several names.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # ENXIO: a socket, or a pipe without a reader
            raise PermissionError(f"{path} is not a regular file of yours; remove it") from error
        raise
    try:
        info = os.fstat(descriptor)
        reason = weakness(info)
        if not stat.S_ISREG(info.st_mode):
            reason = "it is not a regular file"
        if info.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            reason = "it has other names, under which it would be changed as well"
        if reason is not None:
            raise PermissionError(f"{path} cannot be relied on: {reason}; remove it or change its mode")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_owned(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file that only this user (or root) can change.

    Raises:
        PermissionError: see `open_owned`. ValueError: it has over `max_bytes` bytes. OSError: it cannot be read.
    """
    with os.fdopen(open_owned(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has over {max_bytes} bytes")
    return content


def remove_socket(path: Path) -> None:
    """Remove the file of a UNIX socket at which no process listens. A path without a file is left as it is.

    Raises:
        OSError: it is not a socket of this user, or a process listens there.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
        raise FileExistsError(
            f"{path} exists and is not a socket of yours; remove it, or choose another address"
        )
    if is_listening(path):
        raise OSError(f"another program listens at {path}; choose another address")
    path.unlink(missing_ok=True)


def is_listening(path: Path) -> bool:
    """True unless the connection to a UNIX socket is refused, because no process listens there."""
    import socket  # a frontend that attaches asks ZeroMQ

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # such as a full queue of connections
            return True
    return True
