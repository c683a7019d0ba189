"""Small models in every dtype, and an S3 endpoint that breaks its promises on request."""

import json
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import MANIFEST_KEY, Manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.s3_store import S3Store

BUCKET = "models"
ERROR = "<Error><Code>{}</Code><Message>injected</Message><RequestId>req-7</RequestId></Error>"
ERROR_CODES = {
    "403": (403, "AccessDenied"),
    "expired": (403, "ExpiredToken"),
    "404": (404, "NoSuchKey"),
    "412": (412, "PreconditionFailed"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class FaultServer(ThreadingHTTPServer):
    """Serves `objects` as S3 does. `faults` are used up one per ranged request; `always` applies when none is left."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FaultHandler)
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.faults: deque[str] = deque()
        self.always = ""
        self.ranges: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.on_range: Callable[[int], None] = lambda count: None
        self.resume = threading.Event()
        self.connections = 0

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what these tests are about."""

    def hold(self, folder: Path, manifest: Manifest) -> None:
        """Serves a store folder under the bucket's root, with the ETags its manifest lists."""
        entries = {entry.name: entry for entry in [*manifest.files, *manifest.documents.values()]}
        for path in folder.iterdir():
            self.objects[path.name] = path.read_bytes()
            self.etags[path.name] = entries[path.name].etag if path.name in entries else '"manifest"'


class FaultHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
        data, etag = self.server.objects.get(path), self.server.etags.get(path, "")
        if data is None:
            return self.refuse("404")
        if "Range" not in self.headers:
            return self.answer(200, data, {"ETag": etag})
        self.server.ranges.append((path, self.headers["Range"]))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.on_range(len(self.server.ranges))
        fault = self.server.faults.popleft() if self.server.faults else self.server.always
        etag = self.server.etags[path]
        if fault in ERROR_CODES:
            return self.refuse(fault)
        if self.headers.get("If-Match", etag) != etag:
            return self.refuse("412")
        start, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.server.objects[path][start : end + 1]
        headers = {"ETag": etag, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}
        getattr(self, f"send_{fault.replace('-', '_')}", self.send_right)(part, headers)

    def send_right(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers)

    def send_flip(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, bytes([part[0] ^ 1]) + part[1:], headers)

    def send_truncate(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)

    def send_nothing(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=0)

    def send_short_length(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part[:-1], headers)

    def send_wrong_range(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Content-Range": f"bytes 1-{len(part)}/99999999"})

    def send_whole(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(200, part, headers)

    def send_gzip(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Content-Encoding": "gzip"})

    def send_other_etag(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "ETag": '"other"'})

    def send_reset(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)

    def send_hang_up(self, part: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True

    def send_stall(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)
        self.server.resume.wait(60)

    def send_silence(self, part: bytes, headers: dict[str, str]) -> None:
        self.server.resume.wait(60)
        self.close_connection = True

    def send_drip(self, part: bytes, headers: dict[str, str]) -> None:
        """Header and body in small pieces, so that no piece boundary falls where the reader expects one."""
        self.answer(206, part, headers, sent=0)
        self.close_connection = False
        for start in range(0, len(part), 1000):
            self.wfile.write(part[start : start + 1000])
            self.wfile.flush()

    def send_goodbye(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Connection": "close"})

    def refuse(self, fault: str) -> None:
        status, code = ERROR_CODES[fault]
        self.answer(status, ERROR.format(code).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if sent is None else body[:sent])
        self.wfile.flush()
        self.close_connection = self.close_connection or sent is not None


@pytest.fixture
def fault_server(point_at: Callable[[str], None]) -> Iterator[FaultServer]:
    with FaultServer() as server:
        point_at(f"http://127.0.0.1:{server.server_port}")
        yield from serving(server)


@pytest.fixture
def tls_server(
    point_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> Iterator[FaultServer]:
    """The same over TLS, trusted through AWS_CA_BUNDLE."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with FaultServer() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        point_at(f"https://localhost:{server.server_port}")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate[0]))
        yield from serving(server)


def serving(server: FaultServer) -> Iterator[FaultServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.resume.set()
    server.shutdown()
    thread.join()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


WriteModel = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Writes `shards` (one dict of tensors per file) as a Hugging Face folder."""

    def write(*shards: dict[str, torch.Tensor], name: str = "model", config: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        if len(shards) == 1:
            save_file(shards[0], folder / "model.safetensors")
            return folder
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(tensors, folder / shard)
            weight_map |= dict.fromkeys(tensors, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


class Published:
    """A small published model: its tensors, its store folder and its manifest."""

    def __init__(self, source: Path, folder: Path, tensors: dict[str, torch.Tensor], chunk_bytes: int) -> None:
        self.tensors = tensors
        self.folder = folder
        self.store = FileStore(folder)
        self.manifest = publish(source, self.store, chunk_bytes=chunk_bytes)

    def targets(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(t.shape, dtype=dtype or t.dtype) for name, t in self.tensors.items()}

    def serve(self, server: FaultServer, retry_budget_s: float = 5.0) -> S3Store:
        server.hold(self.folder, self.manifest)
        assert MANIFEST_KEY in server.objects
        return S3Store(BUCKET, retry_budget_s=retry_budget_s)


@pytest.fixture
def published(write_model: WriteModel, tmp_path: Path) -> Published:
    """Two shards, 4 KiB chunks, 24 of them."""
    torch.manual_seed(0)
    shards = [
        {"model.embed_tokens.weight": torch.randn(200, 64), "model.layers.0.mlp.weight": torch.randn(100, 64).half()},
        {"model.layers.1.mlp.weight": torch.randn(150, 64).bfloat16(), "model.norm.weight": torch.randn(3000)},
    ]
    return Published(write_model(*shards), tmp_path / "store", shards[0] | shards[1], 4096)
