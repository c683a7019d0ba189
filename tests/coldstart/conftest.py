"""Small models in every dtype, and an S3 endpoint that breaks its promises on request."""

import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import MANIFEST_KEY
from stoker.coldstart.publish import publish
from stoker.coldstart.s3_store import S3Store
from tests.coldstart.fault_server import BUCKET, FaultServer, serving


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
