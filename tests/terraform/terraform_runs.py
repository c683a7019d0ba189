"""Terraform as a user runs it: a copy of terraform/, the provider from a filesystem mirror, moto for a cloud."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3

ROOT = Path(__file__).parents[2]
PROVIDER = Path("registry.terraform.io/hashicorp/aws")
SERVER = Path(__file__).with_name("cloud_server.py")


def mirrors() -> Iterator[Path]:
    """Folders that may be a provider mirror: named, configured, or where Terraform and people put them."""
    yield Path(os.environ.get("STOKER_TERRAFORM_MIRROR", os.devnull))
    config = Path(os.environ.get("TF_CLI_CONFIG_FILE", Path.home() / ".terraformrc"))
    if config.is_file():
        yield from map(Path, re.findall(r'filesystem_mirror\s*{[^}]*path\s*=\s*"([^"]+)"', config.read_text()))
    yield Path.home() / ".terraform.d" / "plugins"
    for shared in (Path.home() / ".local/share", Path("/usr/local/share"), Path("/usr/share")):
        yield shared / "terraform" / "plugins"
    for place in (Path("/opt"), Path("/usr/local/lib"), Path("/var/lib")):
        yield from sorted(path for path in place.glob("*") if (path / PROVIDER).is_dir())


def find_mirror() -> Path | None:
    return next((path for path in mirrors() if (path / PROVIDER).is_dir()), None)


class Failed(AssertionError):
    pass


@dataclass(frozen=True)
class Cloud:
    url: str

    def client(self, service: str, region: str = "us-east-1") -> Any:
        return boto3.client(
            service, region, endpoint_url=self.url, aws_access_key_id="test", aws_secret_access_key="test"
        )


@dataclass(frozen=True)
class Terraform:
    """`folder` holds the copy of terraform/, and a release beside it."""

    folder: Path
    environment: dict[str, str]

    def run(
        self, *arguments: str, where: str = ".", accept: tuple[int, ...] = (0,)
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["terraform", *arguments], cwd=self.folder / where, env=self.environment, capture_output=True, text=True
        )
        if done.returncode not in accept:
            raise Failed(f"terraform {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def reaching(self, cloud: Cloud) -> "Terraform":
        """The same, with that cloud for all of the provider's calls."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
        return replace(self, environment=self.environment | keys | {"AWS_ENDPOINT_URL": cloud.url})

    def plan(self, where: str, name: str) -> dict[str, Any]:
        """The plan as JSON; it is kept in the file `name`."""
        self.run("plan", "-input=false", "-no-color", f"-out={name}", where=where)
        return json.loads(self.run("show", "-json", name, where=where).stdout)


# Merged over an example's own blocks; everything else of it stays. moto lacks NVIDIA's images.
OVERRIDE = """provider "aws" {{
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  s3_use_path_style           = true
  max_retries                 = 1
}}

module "stoker" {{
  worker_ami_id = "{image}"
  {more}
}}
"""


def certificate(cloud: Cloud, region: str) -> str:
    return cloud.client("acm", region).request_certificate(DomainName="llm.example.com")["CertificateArn"]


@dataclass
class Life:
    """What each step of a deployment's life left."""

    plan: bytes
    state: str
    outputs: dict[str, Any]
    again: subprocess.CompletedProcess[str]


def live(terraform: Terraform) -> Life:
    """plan, apply, plan of examples/minimal, with an own queue server: moto has no serverless cache."""
    where = "examples/applied"
    folder = terraform.folder / where
    shutil.copytree(terraform.folder / "examples" / "minimal", folder)
    own = 'redis_url_secret_arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:redis-AbCdEf"'
    more = f"{own}\n  deletion_protection = false"
    (folder / "test_override.tf").write_text(OVERRIDE.format(image="ami-12c6146b", more=more))
    terraform.run("plan", "-input=false", "-no-color", "-out=first", where=where)
    terraform.run("apply", "-no-color", "-parallelism=20", "first", where=where)
    again = terraform.run("plan", "-input=false", "-no-color", "-detailed-exitcode", where=where, accept=(0, 1, 2))
    outputs = json.loads(terraform.run("output", "-json", where=where).stdout)["stoker"]["value"]
    with zipfile.ZipFile(folder / "first") as plan:
        planned = b"".join(map(plan.read, plan.namelist()))
    return Life(planned, (folder / "terraform.tfstate").read_text(), outputs, again)
