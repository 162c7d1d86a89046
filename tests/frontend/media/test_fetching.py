"""What a client can make a frontend fetch: public hosts and files below one folder, and nothing else."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.media import download as downloads
from pagewire.frontend.media.access import MediaAccess, is_public
from pagewire.frontend.media.download import (
    MALFORMED,
    RESOLVERS_OF_TENANT,
    UNREACHABLE,
    DownloadLimits,
    Resolvers,
    download_media,
)
from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.local_file import NOT_READABLE, read_local_file
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.tenants import current_tenant
from tests.frontend.media.attack_server import CONTENT, AttackServer

LIMITS = DownloadLimits(20.0, 1 << 20)
# As if 127.0.0.1 were a public address, and the rest of loopback were not.
ACCESS = MediaAccess(None, (ip_network("127.0.0.1/32"),))


@pytest.fixture(scope="module")
def server() -> Iterator[AttackServer]:
    server = AttackServer()
    yield server
    server.close()


def test_names_that_hang_of_one_tenant_leave_threads_to_others(
    monkeypatch: pytest.MonkeyPatch, server: AttackServer
) -> None:
    answer = threading.Event()
    resolve = socket.getaddrinfo

    def hang(host: str, *rest: Any) -> Any:
        return answer.wait(60) if host == "hangs.example" else resolve("127.0.0.1", *rest)

    own = Resolvers()
    monkeypatch.setattr(downloads, "resolvers", own)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    hanging = [own.begin("a", "hangs.example", 80, socket.AF_INET) for _ in range(RESOLVERS_OF_TENANT)]
    found = []
    for tenant in "ab":
        current_tenant.set(tenant)
        try:
            found.append(download_media(server.url("/ok", "good.example"), ACCESS, LIMITS))
        except EngineBusyError as error:
            assert "24 names of hosts are already being resolved" in str(error)
    current_tenant.set("")
    assert found == [CONTENT]
    answer.set()
    assert all(future.result() for future in hanging)
    assert own.begin("a", "good.example", 80, socket.AF_INET).result()


# ---------------------------------------------------------------- addresses

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.216.34",
    "2606:4700::1111",
    "2a00:1450:4001:80b::200e",
    "64:ff9b::808:808",
]
PUBLIC += ["::ffff:8.8.8.8", "172.32.0.1", "192.167.255.255", "100.128.0.1", "223.255.255.255"]
NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.127.255.255 127.0.0.1 127.255.255.254 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.170 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.19.255.255
198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::ffff:127.0.0.1 ::ffff:7f00:1 ::ffff:10.0.0.1 ::ffff:0:127.0.0.1 ::127.0.0.1 ::a00:1 64:ff9b::7f00:1
64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1 2001:0:7f00:1::1 2001:10::1 2001:20::1 2001:db8::1
2002:7f00:1::1 2002:a00:1::1 2002:808:808::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1
"""


def test_which_addresses_are_public() -> None:
    assert [text for text in PUBLIC if not is_public(ip_address(text))] == []
    assert [text for text in NOT_PUBLIC.split() if is_public(ip_address(text))] == []
    assert not MediaAccess().allows_address("fe80::1%eth0") and not MediaAccess().allows_address("nonsense")


# Spellings of loopback and of a private address, which the system's resolver understands.
SPELLINGS = """
127.0.0.1 127.1 127.0.1 2130706433 0x7f000001 0x7f.0.0.1 0177.0.0.1 017700000001 0 0.0.0.0 localhost LOCALHOST.
10.0.0.1 167772161 012.0.0.1 0xa000001 169.254.169.254 2852039166 0xa9fea9fe 0251.0376.0251.0376
[::1] [::] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:a9fe:a9fe] [64:ff9b::7f00:1] [fe80::1] [fd00::1]
127.0.0.1.
"""


@pytest.mark.parametrize("by", ["direct", "redirect"])
def test_no_spelling_of_an_address_is_a_way_in(by: str, server: AttackServer) -> None:
    """Whatever the URL, and wherever a redirect leads: the server, which has all of loopback, is not asked."""
    access = MediaAccess(None, (ip_network("127.0.0.3/32"),))
    assert download_media(server.url("/ok", "127.0.0.3"), access, LIMITS) == CONTENT
    before = server.seen["/ok"]
    for host in SPELLINGS.split():
        url = f"http://{host}:{server.port}/ok"
        start = url if by == "direct" else server.url(f"/redirect?{url}", "127.0.0.3")
        with pytest.raises(MediaError) as caught:
            download_media(start, access, LIMITS)
        assert str(caught.value) in (UNREACHABLE, MALFORMED), host
    assert server.seen["/ok"] == before


def test_a_name_that_changes_its_address_is_connected_to_where_it_was_checked(
    server: AttackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the name is resolved once for each request, and the address that was checked is used."""
    answers: list[str] = []
    connected: list[str] = []
    real_sockets = downloads.CheckedSockets.__call__

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        address = answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def make(self: Any, place: Any) -> socket.socket:
        made = real_sockets(self, place)
        connected.append(place[4][0])
        return made

    monkeypatch.setattr(downloads.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(downloads.CheckedSockets, "__call__", make)
    url = server.url("/ok", "rebind.example")
    answers[:] = ["127.0.0.1", "127.0.0.2"]
    assert download_media(url, ACCESS, LIMITS) == CONTENT
    assert (answers, connected) == (["127.0.0.2"], ["127.0.0.1"])
    with pytest.raises(MediaError):  # and the second address is not accepted later
        download_media(url, ACCESS, LIMITS)
    answers[:] = ["127.0.0.1", "127.0.0.2"]
    with pytest.raises(MediaError):
        download_media(server.url(f"/redirect?{url}", "rebind.example"), ACCESS, LIMITS)
    assert connected == ["127.0.0.1", "127.0.0.1"]


def test_hosts_and_networks_of_the_operator(server: AttackServer) -> None:
    access = MediaAccess.read(domains=["Example.org.", "*.bücher.example", "127.0.0.0/8", "2001:db8::1"])
    for host in ("example.org", "example.org.", "a.xn--bcher-kva.example", "127.9.9.9", "2001:db8::1"):
        assert access.allows_host(host), host
    for host in (
        "www.example.org",
        "example.org.evil.example",
        "xn--bcher-kva.example",
        "10.0.0.1",
        "2130706433",
    ):
        assert not access.allows_host(host), host
    assert access.allows_address("127.0.0.2") and access.allows_address("::ffff:127.0.0.2")
    assert not access.allows_address("10.0.0.1")
    assert download_media(server.url("/ok"), access, LIMITS) == CONTENT
    with pytest.raises(MediaError, match=r"'localhost' .* not among the server's --allowed-media-domains"):
        download_media(server.url("/ok", "localhost"), access, LIMITS)
    with pytest.raises(MediaError, match=r"'evil\.example' .* not among"):
        download_media(server.url("/redirect?http://evil.example/"), access, LIMITS)
    for bad in ("a b", "http://example.org", "10.0.0.1/8", "*", ""):
        with pytest.raises(ValueError, match="allowed_media_domains"):
            MediaAccess.read(domains=[bad])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/missing", "answered with status 404$"),
        ("/endless", "more than 1048576 bytes"),
        ("/slow", "less than 4096 bytes a second"),
        ("/compressed", "compressed body"),
        ("/nonsense", "not valid HTTP"),
        ("/redirect?loop", "redirected more than 5 times"),
        ("/redirect?file:///etc/passwd", "only http, https, data"),
        ("/redirect?ftp://127.0.0.1/ok", "only http, https, data"),
        ("/redirect?nowhere", "redirected to nowhere"),
        ("/redirect?" + "a" * 8200, "more than 8192 characters"),
        ("ftp://127.0.0.1/ok", "only http, https, data"),
        ("http://user:word@127.0.0.1/ok", "must not have a user"),
        ("http://127.0.0.1:99999/ok", "malformed|only http"),
        ("http://[::1/ok", "malformed"),
        ("http:///ok", "malformed|only http"),
        ("http://127.0.0.1/" + "a" * 9000, "more than 8192 characters"),
        ("http://no-such-host.invalid/", "cannot be reached"),
    ],
)
def test_answers_that_are_given_up(target: str, message: str, server: AttackServer) -> None:
    url = server.url(target) if target.startswith("/") else target
    with pytest.raises(MediaError, match=message) as caught:
        download_media(url, ACCESS, LIMITS)
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_a_host_that_is_silent_takes_no_longer_than_the_limit(server: AttackServer) -> None:
    with pytest.raises(MediaError, match=r"took more than 0\.2 s"):
        download_media(server.url("/silent"), ACCESS, DownloadLimits(0.2, 1 << 20))


# ---------------------------------------------------------------- files


def test_files_are_read_below_the_folder_only(tmp_path: Path) -> None:
    folder, outside = tmp_path / "media", tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    outside.mkdir()
    (folder / "a").write_bytes(b"a")
    (folder / "inner" / "b").write_bytes(b"b")
    (outside / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(folder / "inner" / "b")
    (folder / "away").symlink_to(outside / "secret")
    (folder / "gone").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "closed").write_bytes(b"")
    (folder / "closed").chmod(0)
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "c").write_bytes(b"c")
    os.mkfifo(folder / "pipe")
    root = MediaAccess.read(str(folder)).folder

    def read(path: Path | str) -> bytes:
        return read_local_file(str(path), root, 10)

    assert read(folder / "a") == b"a" and read(folder / "link") == b"b"
    assert read(folder / "inner" / ".." / "a") == b"a"
    refused = [
        outside / "secret",
        folder / "away",
        folder / "gone" / "secret",
        folder / ".." / "outside" / "secret",
        folder / "loop",
        folder / "pipe",
        folder / "inner",
        folder / "missing",
        folder,
        tmp_path / "media-too" / "c",
        "/proc/self/environ",
        "/dev/zero",
        "relative",
        "nul\0",
        "",
    ]
    for path in refused:
        with pytest.raises(MediaError) as caught:
            read(path)
        assert str(caught.value) == NOT_READABLE, path
    (folder / "a").write_bytes(bytes(11))
    with pytest.raises(MediaError, match="more than 10 bytes"):
        read(folder / "a")
    with pytest.raises(MediaError, match="not allowed: the server has no --allowed-local-media-path"):
        read_local_file(str(folder / "a"), None, 10)
    with pytest.raises(ValueError, match="must be a folder"):
        MediaAccess.read(str(folder / "a"))


def test_a_link_that_comes_after_the_check_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is resolved, then a folder and a file of it become links: neither is followed."""
    folder = tmp_path / "media"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_bytes(b"a")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"secret")
    real = Path.resolve

    def resolve_then_swap(self: Path, strict: bool = False) -> Path:
        resolved = real(self, strict)
        if swap == "folder":
            (folder / "inner").rename(folder / "moved")
            (folder / "inner").symlink_to(tmp_path / "outside")
        else:
            (folder / "inner" / "a").unlink()
            (folder / "inner" / "a").symlink_to(tmp_path / "outside" / "a")
        return resolved

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    for swap in ("file", "folder"):
        with pytest.raises(MediaError) as caught:
            read_local_file(str(folder / "inner" / "a"), folder, 10)
        assert str(caught.value) == NOT_READABLE
        if swap == "file":
            (folder / "inner" / "a").unlink()
            (folder / "inner" / "a").write_bytes(b"a")
