"""Formatting, validity, `terraform test`, and a whole life of examples/minimal on moto."""

import re
from concurrent.futures import Future

import pytest
from terraform_runs import ROOT, Cloud, Life, Terraform

pytestmark = [pytest.mark.xdist_group("terraform"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def started(life: Future[Life]) -> None:
    """The deployment's life begins with the first of these tests and is looked at by the last ones."""


def test_everything_is_formatted(terraform: Terraform) -> None:
    terraform.run("fmt", "-check", "-recursive", "-diff", "-no-color", str(ROOT / "terraform"))


def test_the_configuration_is_valid(initialised: Terraform) -> None:
    """The examples are planned, which is more."""
    assert "The configuration is valid" in initialised.run("validate", "-no-color").stdout


def test_every_module_by_itself(initialised: Terraform) -> None:
    done = initialised.run("test", "-no-color", accept=(0, 1))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Success! \d+ passed, 0 failed", done.stdout)
    tested = "".join(path.read_text() for path in (initialised.folder / "tests").glob("*.tftest.hcl"))
    modules = {path.name for path in (initialised.folder / "modules").iterdir()}
    assert set(re.findall(r'source = "./modules/(\w+)"', tested)) == modules - {"secret"}


def test_an_applied_deployment_is_what_was_planned(life: Future[Life], cloud: Cloud) -> None:
    result = life.result()
    assert result.again.returncode == 0, result.again.stdout
    groups = cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    sizes = {group["AutoScalingGroupName"]: (group["MinSize"], group["DesiredCapacity"]) for group in groups}
    assert sizes == {"stoker-gateway": (1, 1), "stoker-controller": (1, 1), "stoker-pool-l4": (0, 0)}
    listeners = cloud.client("elbv2").describe_load_balancers()["LoadBalancers"]
    assert [found["DNSName"] for found in listeners] == [result.outputs["dns_name"]]


def test_hosts_find_their_release_in_the_bucket(life: Future[Life], cloud: Cloud) -> None:
    digest = life.result().outputs["release"]
    bucket = life.result().outputs["store_url"].split("/")[2]
    listed = cloud.client("s3").list_objects_v2(Bucket=bucket, Prefix=f"releases/{digest[:16]}/")["Contents"]
    names = {entry["Key"].rpartition("/")[2] for entry in listed}
    assert {"SHA256SUMS", "constraints.txt", "requirements-control.txt", "requirements-worker.txt"} < names


def test_the_secret_is_drawn_and_is_neither_in_the_state_nor_in_the_plan(life: Future[Life], cloud: Cloud) -> None:
    result = life.result()
    secret = cloud.client("secretsmanager").get_secret_value(SecretId="stoker-key-seed")["SecretString"]
    assert len(secret) >= 16
    assert secret not in result.state and secret.encode() not in result.plan
    assert "stoker-key-seed" in result.outputs["root_key_command"]


def test_it_can_be_destroyed(initialised: Terraform, life: Future[Life], cloud: Cloud) -> None:
    life.result()
    initialised.run(
        "destroy", "-auto-approve", "-no-color", "-refresh=false", "-parallelism=20", where="examples/applied"
    )
    assert cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"] == []
    assert cloud.client("s3").list_buckets()["Buckets"] == []
