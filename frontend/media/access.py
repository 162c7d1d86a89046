"""Rules of fetching for clients: from public hosts, the operator's hosts and networks, and one folder.

A client's URL makes this machine open a connection. Without these rules a client could reach what only this machine
can reach: services on loopback, a cloud's metadata address, hosts of the internal network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from pagewire.ipc.quoting import quoted

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# IPv6 addresses are handed out of 2000::/3 only. Not public within it: documentation (two networks), benchmarks and
# other protocols, and tunnels (6to4, Teredo, ORCHID), which lead to an IPv4 address of the sender's choice.
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_IPV6 = [
    ipaddress.IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
# Networks with IPv6 alone reach IPv4 hosts through addresses that end with the IPv4 address.
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
NOT_PUBLIC_IPV4 = [
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",  # private, as are 172.16.0.0/12 and 192.168.0.0/16
        "100.64.0.0/10",  # a provider's inner network
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local: metadata of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols
        "192.0.2.0/24",  # documentation, as are 198.51.100.0/24 and 203.0.113.0/24
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
]
HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?")


def is_public(address: Address) -> bool:
    """True for an address that any host of the internet may reach; False for all others, and in doubt."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_IPV4)
    if (mapped := address.ipv4_mapped) is not None:
        return is_public(mapped)
    if address in TRANSLATED:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in GLOBAL_UNICAST and not any(address in network for network in NOT_PUBLIC_IPV6)


class MediaAccess(msgspec.Struct, frozen=True):
    """The rules; `read` makes them from options.

    hosts: names of hosts that may be fetched from, *.NAME for all below it; None: any.
    networks: addresses that may be connected to although they are not public.
    folder: below which `file:` URLs may be read, without links in its path; None: nowhere.
    """

    hosts: frozenset[str] | None = None
    networks: tuple[Network, ...] = ()
    folder: Path | None = None

    @classmethod
    def read(cls, local_path: str = "", domains: Sequence[str] | None = None) -> MediaAccess:
        """The rules of the options `allowed_local_media_path` and `allowed_media_domains`.

        Raises:
            ValueError: the path is no folder, or a domain is neither a host's name nor a network.
        """
        folder = None
        if local_path:
            folder = Path(local_path).expanduser().resolve()
            if not folder.is_dir():
                raise ValueError(f"allowed_local_media_path must be a folder, got {quoted(local_path)}")
        if domains is None:
            return cls(folder=folder)
        names, networks = set(), []
        for entry in domains:
            if (network := network_of(entry)) is not None:
                networks.append(network)
            else:
                names.add(host_of(entry))
        return cls(frozenset(names), tuple(networks), folder)

    def allows_host(self, host: str) -> bool:
        """True if a URL may name this host: a name, or an address in its usual form. host: in small letters."""
        host = host.rstrip(".")
        if self.hosts is None or host in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            above = host.split(".")
            return any(f"*.{'.'.join(above[level:])}" in self.hosts for level in range(1, len(above)))
        return self._in_networks(address)

    def allows_address(self, text: str) -> bool:
        """True if a connection to this IP address may be made, whatever the name is by which it was found."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        return is_public(address) or self._in_networks(address)

    def _in_networks(self, address: Address) -> bool:
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self.networks)


def network_of(text: str) -> Network | None:
    """The network, or the single address, that an entry names; None if it names a host.

    Raises:
        ValueError: a network with bits outside of its mask.
    """
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        if "/" in text:
            raise ValueError(
                f"allowed_media_domains: {quoted(text)} is neither a host's name nor a network"
            ) from None
        return None


def host_of(text: str) -> str:
    """A host's name as URLs have it: small letters, IDNA.

    Raises:
        ValueError: it is none.
    """
    try:
        host = text.rstrip(".").lower()
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        host = ""
    if HOST.fullmatch(host) is None:
        raise ValueError(
            f"allowed_media_domains: {quoted(text)} is not the name of a host (example.org, *.example.org), "
            "an address or a network (10.0.0.0/8)"
        )
    return host
