"""Fixtures of the Terraform tests; each is made once, because the provider is slow to start."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from terraform_runs import (
    OVERRIDE,
    ROOT,
    SERVER,
    Cloud,
    Life,
    Terraform,
    certificate,
    find_mirror,
    live,
)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make wheel` leaves it, with a wheel of a few bytes."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "stoker-0.1.0-py3-none-any.whl").write_bytes(b"a wheel")
    subprocess.run([sys.executable, ROOT / "terraform" / "release.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def terraform(tmp_path_factory: pytest.TempPathFactory, release: Path) -> Terraform:
    if shutil.which("terraform") is None:
        pytest.skip("no terraform on the PATH")
    mirror = find_mirror()
    if mirror is None:
        pytest.skip("no mirror of the AWS provider; name one with STOKER_TERRAFORM_MIRROR")
    folder = tmp_path_factory.mktemp("deployment")
    shutil.copytree(
        ROOT / "terraform", folder / "terraform", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*")
    )
    shutil.copytree(release, folder / "dist" / "release")
    config = folder / "terraform.rc"
    direct = 'direct {\n    exclude = ["*/*"]\n  }'
    config.write_text(
        f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n  {direct}\n}}\n'
    )
    settings = {"TF_CLI_CONFIG_FILE": str(config), "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
    return Terraform(folder / "terraform", kept | settings)


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    server = subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        yield Cloud(f"http://127.0.0.1:{server.stdout.readline().strip()}")
        server.communicate()


@pytest.fixture(scope="session")
def initialised(terraform: Terraform, cloud: Cloud) -> Terraform:
    """Root and examples are initialised, and moto is their cloud."""
    variables = {
        "minimal": {
            "certificate_arn": certificate(cloud, "us-east-1"),
            "domain": "llm.example.com",
            "allowed_cidrs": ["203.0.113.0/24"],
        },
        "complete": {
            "certificate_arn": certificate(cloud, "eu-central-1"),
            "zone_id": "Z0123456789",
            "domain": "llm.example.com",
            "redis_url_secret_arn": "arn:aws:secretsmanager:eu-central-1:123456789012:secret:redis-AbCdEf",
        },
    }
    terraform.run("init", "-input=false", "-no-color")
    for example, values in variables.items():
        folder = terraform.folder / "examples" / example
        (folder / "test_override.tf").write_text(OVERRIDE.format(image="ami-0123456789abcdef0", more=""))
        (folder / "terraform.tfvars.json").write_text(json.dumps(values))
        terraform.run("init", "-input=false", "-no-color", where=f"examples/{example}")
    return terraform.reaching(cloud)


@pytest.fixture(scope="session")
def plans(initialised: Terraform) -> dict[str, dict[str, Any]]:
    """The examples' plans: minimal makes a cache of its own, complete has an own server."""
    return {example: initialised.plan(f"examples/{example}", "plan") for example in ("minimal", "complete")}


@pytest.fixture(scope="session")
def life(initialised: Terraform) -> Iterator[Future[Life]]:
    """Goes on in the background: the provider spends most of it waiting for a load balancer."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(live, initialised)
