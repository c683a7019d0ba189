"""Which addresses a webhook may be sent to: public ones, and the networks that the operator allows."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# What `is_global` doesn't exclude in every version of Python: shared, relay, test, tunnel and site-local ranges, and
# metadata services of clouds that aren't link-local.
NEVER = tuple(
    ip_network(each)
    for each in (
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4"),
        *("168.63.129.16/32", "2001::/32", "2001:10::/28", "2001:20::/28", "2002::/16", "100::/64", "5f00::/16"),
        *("fec0::/10", "fd00:ec2::/32"),
    )
)
NAT64 = ip_network("64:ff9b::/96")


def networks_of(text: str) -> tuple[Network, ...]:
    """From a list with commas. Raises ValueError, which names the part that is no network."""
    return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())


def address_of(text: str) -> Address:
    """As a resolver gave it: an IPv4 address in an IPv6 one (mapped, or translated by NAT64) counts as what it is."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv4Address):
        return address
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else address.ipv4_mapped or address


def is_public(address: Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    return address.is_global and not special and not within(address, NEVER)


def within(address: Address, networks: Sequence[Network]) -> bool:
    return any(network.version == address.version and address in network for network in networks)


def is_allowed(text: str, allowed: Sequence[Network]) -> bool:
    """Whether the operator named the address's network."""
    return within(address_of(text), allowed)


def may_receive(text: str, allowed: Sequence[Network]) -> bool:
    return is_allowed(text, allowed) or is_public(address_of(text))
