"""No webhook reaches what only its sender's network can reach: addresses, names, forms of URLs, redirects."""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.webhooks import sender as sending
from stoker.runtime.webhooks.address import may_receive, networks_of
from stoker.runtime.webhooks.sender import NoAnswer, Refused, Sender
from stoker.runtime.webhooks.target import InvalidTarget, target_of
from tests.connections import serving
from tests.runtime.webhooks.receiver import Receiver, receiving

HOST = "hooks.example.com"
HERE = networks_of("127.0.0.0/8")

INSIDE = (
    *(
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
    ),
    *(
        "169.254.169.254",
        "169.254.170.2",
        "100.64.0.1",
        "100.127.255.255",
        "198.18.0.1",
        "192.0.0.192",
        "224.0.0.1",
        "255.255.255.255",
    ),
    *("240.0.0.1", "168.63.129.16", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "::7f00:1"),
    *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fec0::1", "2001:db8::1"),
)
OUTSIDE = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_are_refused(address: str) -> None:
    assert not may_receive(address, ())


@pytest.mark.parametrize("address", OUTSIDE)
def test_public_addresses(address: str) -> None:
    assert may_receive(address, ())


@given(st.ip_addresses(v=4))
def test_however_an_ipv4_address_is_written_as_ipv6(address: object) -> None:
    plain, number = str(address), int(ip_address(str(address)))
    for written in (f"::ffff:{plain}", f"64:ff9b::{plain}"):
        assert may_receive(written, ()) == may_receive(plain, ())
        assert may_receive(written, networks_of(f"{plain}/32"))
    assert not may_receive(f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1", ())


def test_only_named_networks_are_allowed() -> None:
    allowed = networks_of("10.1.0.0/16, fd12::/32")
    assert [may_receive(each, allowed) for each in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "8.8.8.8")] == [True] * 4
    assert [may_receive(each, allowed) for each in ("10.2.0.1", "127.0.0.1", "fd13::1")] == [False] * 3
    with pytest.raises(ValueError, match=r"10\.1\.0\.1/16"):
        networks_of("10.1.0.1/16")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://good.com\\@127.0.0.1/",
            "https://good.com@127.0.0.1/",
            "https://good.com:80@evil.com/",
            "https://a@b/",
        ),
        *("https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/", "https://0x7f.1/"),
        *("https://127.0.0.1./", "https://①②⑦.0.0.1/", "https://evil.com\\.good.com/", "https://good.com\t.evil.com/"),
        *("https://good.com /", " https://good.com/", "https://good.com/#@evil.com", "https:good.com", "https:///x"),
        *("//good.com/", "file:///etc/passwd", "gopher://good.com/", "https://good.com:99999/", "https://good.com:22/"),
        *("https://good.com/a b", "https://good.com/\r\nhost: evil", "https://[::1%25eth0]/", "https://[127.0.0.1]/"),
        *("https://good.com\x00.evil.com/", "https://-bad.com/", "https://a..b/", "https://" + "a." * 200 + "com/"),
        *("https://good.com/\\evil", "https://good.com/<x>", "https://good.com/x" + "y" * 2048, "", "https://"),
    ],
)
def test_forms_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidTarget):
        target_of(url)


@given(st.text(max_size=60), st.text(max_size=30))
def test_what_is_accepted_has_one_reading(middle: str, tail: str) -> None:
    """The host that would be connected to is the one in front of the first `/`, `?` or `:`, whoever reads it."""
    try:
        target = target_of(f"https://{middle}/{tail}")
    except InvalidTarget:
        return
    authority = middle.partition("/")[0].partition("?")[0]
    assert authority.lower().startswith((target.host, f"[{target.host}]")) or ":" in target.host
    assert not set("\\@ \t\r\n#") & set(authority)
    assert "\r" not in target.path and "\n" not in target.path and " " not in target.path


def test_usual_forms() -> None:
    target = target_of("HTTPS://Hooks.Example.com:8443/a/b?c=d&e=%20")
    assert (target.scheme, target.host, target.port, target.path) == ("https", HOST, 8443, "/a/b?c=d&e=%20")
    assert target.host_header == f"{HOST}:8443"
    assert target_of("https://example.com").path == "/" and target_of("https://example.com?x=1").path == "/?x=1"
    assert target_of("https://[2606:4700::1]/").host_header == "[2606:4700::1]"
    assert target_of("https://8.8.8.8/").host == "8.8.8.8"


class Resolver:
    """Answers one question after the other with the given addresses, the last ones for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


async def test_a_name_is_resolved_once_and_its_address_kept(receiver: Receiver) -> None:
    """A name that leads elsewhere when asked again (rebinding) is not asked again."""
    rebinding = Resolver(["127.0.0.1"], ["127.0.0.2"])
    status = await Sender(HERE, rebinding).post(target_of(f"http://{HOST}:{receiver.port}/x"), {}, b"{}")
    assert status == 200 and rebinding.asked == [(HOST, receiver.port)]
    assert receiver.calls[0].headers["host"] == f"{HOST}:{receiver.port}"


@pytest.mark.parametrize(
    "addresses", [["8.8.8.8", "127.0.0.1"], ["10.0.0.1"], ["2606:4700::1", "::ffff:10.0.0.1"], ["fe80::1%lo"]]
)
async def test_one_inner_address_is_enough_to_refuse(receiver: Receiver, addresses: list[str]) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(Refused, match="not public") as refused:
            await Sender((), Resolver(addresses)).post(target_of(f"{scheme}://{HOST}:{receiver.port}/"), {}, b"{}")
        assert not any(address in str(refused.value) for address in addresses)
    assert receiver.calls == []


async def test_the_systems_resolver_is_believed_no_more(receiver: Receiver) -> None:
    for host in ("localhost", "127.0.0.1"):
        with pytest.raises(Refused, match="not public"):
            await Sender(()).post(target_of(f"http://{host}:{receiver.port}/"), {}, b"{}")
    assert receiver.calls == []


async def test_plain_http_stays_inside() -> None:
    with pytest.raises(Refused, match="https only"):
        await Sender(HERE, Resolver(["8.8.8.8"])).post(target_of(f"http://{HOST}/"), {}, b"{}")


async def test_no_redirect_is_followed(receiver: Receiver) -> None:
    with receiving() as inner:
        receiver.answer = lambda _: (302, {"location": inner.url})
        assert await Sender(HERE).post(target_of(receiver.url), {}, b"{}") == 302
        assert inner.calls == [] and len(receiver.calls) == 1


async def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await Sender(HERE).post(target_of(receiver.url), {}, b"{}") == 200
        assert proxy.calls == [] and len(receiver.calls) == 1


async def test_a_name_without_an_address() -> None:
    with pytest.raises(NoAnswer, match="no address"):
        await Sender(HERE, Resolver([])).post(target_of(f"https://{HOST}/"), {}, b"{}")
    with pytest.raises(NoAnswer, match="can't be resolved"):
        await Sender(HERE).post(target_of("https://no-such-host.invalid/"), {}, b"{}")


async def test_a_receiver_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        for byte in b"HTTP/1.1 200 OK\r\nx-slow: " + b"x" * 18:
            writer.write(bytes((byte,)))
            await asyncio.sleep(0.05)
        left.set()

    left = asyncio.Event()
    async with serving(drip) as port:
        with pytest.raises(NoAnswer, match="no answer within"):
            await Sender(HERE).post(target_of(f"http://127.0.0.1:{port}/"), {}, b"{}")
        assert not left.is_set()
        await left.wait()


def certificate(folder: Path, name: str) -> ssl.SSLContext:
    """A server's context with a self-signed certificate for `name`, which also lies in `folder` as cert.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    (folder / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def test_tls_asks_for_the_name_and_not_for_the_address(tmp_path: Path) -> None:
    tls, names = certificate(tmp_path, HOST), []
    tls.sni_callback = lambda _, name, __: names.append(name)
    trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with receiving(tls) as receiver:
        sender = Sender(HERE, Resolver(["127.0.0.1"]), trust)
        assert await sender.post(target_of(f"https://{HOST}:{receiver.port}/x"), {}, b"{}") == 200
        assert names == [HOST] and receiver.calls[0].headers["host"] == f"{HOST}:{receiver.port}"
        with pytest.raises(NoAnswer, match="[Cc]ertificate"):
            await sender.post(target_of(f"https://other.example.com:{receiver.port}/x"), {}, b"{}")
        with pytest.raises(NoAnswer, match="[Cc]ertificate"):
            await Sender(HERE, Resolver(["127.0.0.1"])).post(target_of(f"https://{HOST}:{receiver.port}/"), {}, b"")
        assert len(receiver.calls) == 1
