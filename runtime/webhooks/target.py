"""A webhook's URL, read once: what is checked is what is connected to. Forms that two parsers could read differently
are refused."""

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from stoker.coldstart.http_connection import DEFAULT_PORTS, Origin

MOST_CHARACTERS = 2048
URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]*:[0-9a-f:.]*\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?(?P<rest>[/?][!-~]*)?",
    re.I,
)
PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# A number in the last label makes it an IPv4 address for some parsers (WHATWG URL, "ends in a number").
NUMERIC = re.compile(r"\d+|0x[0-9a-f]*", re.I)
LOWEST_OTHER_PORT = 1024


class InvalidTarget(ValueError):
    """A URL that no webhook can have; the message says why, and never repeats the URL's query."""


@dataclass(frozen=True, slots=True)
class Target:
    """`host` is a name, or an address without brackets; `path` has the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        return Origin(self.scheme, self.host, self.port).authority


def target_of(url: str) -> Target:
    """Raises InvalidTarget."""
    if len(url) > MOST_CHARACTERS:
        raise InvalidTarget(f"a webhook's URL has at most {MOST_CHARACTERS} characters")
    if not url.isascii():
        raise InvalidTarget("a webhook's URL is ASCII: write the host in Punycode and percent-encode the rest")
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise InvalidTarget("a webhook's URL has no user or password; put a token into its path or query")
    match = URL.fullmatch(url)
    path = (match["rest"] or "/") if match else "/"
    if match is None or not PATH.fullmatch(path):
        raise InvalidTarget("a webhook's URL looks like https://host[:port]/path?query, without fragment or backslash")
    scheme, port = match["scheme"].lower(), int(match["port"] or DEFAULT_PORTS[match["scheme"].lower()])
    if port not in DEFAULT_PORTS.values() and not LOWEST_OTHER_PORT <= port <= 65535:
        raise InvalidTarget(f"a webhook's port is 80, 443, or {LOWEST_OTHER_PORT} to 65535, not {port}")
    return Target(scheme, host_of(match["host"].lower()), port, path if path.startswith("/") else f"/{path}")


def host_of(text: str) -> str:
    if text.startswith("["):
        return literal(text[1:-1])
    labels = text.removesuffix(".").split(".")
    if NUMERIC.fullmatch(labels[-1]):
        return literal(text)
    if len(text) > 253 or not all(LABEL.fullmatch(label) for label in labels):
        raise InvalidTarget(f"'{text}' is no host name")
    return text


def literal(text: str) -> str:
    """An address in its usual form only: not decimal, octal, hexadecimal or shortened."""
    try:
        return str(IPv6Address(text) if ":" in text else IPv4Address(text))
    except AddressValueError:
        raise InvalidTarget(f"'{text}' is no address in its usual form") from None


def is_address(host: str) -> bool:
    """Whether a target's host is no name."""
    return ":" in host or bool(NUMERIC.fullmatch(host.rpartition(".")[2]))
