"""What a plan would make is looked through before anything is made: the plans of both examples, as JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.runtime import payloads
from stoker.runtime.worker import kernel_store

pytestmark = [pytest.mark.xdist_group("terraform"), pytest.mark.timeout(300)]

# Of these AWS knows no resources that they could be limited to.
UNLIMITED = {"autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities"}


@pytest.fixture(params=["minimal", "complete"])
def plan(plans: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    return plans[request.param]


def modules(module: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield module
    for child in module.get("child_modules", []):
        yield from modules(child)


def planned(plan: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The values of all planned resources of a kind; there is at least one, or a check would check nothing."""
    resources = [r for m in modules(plan["planned_values"]["root_module"]) for r in m.get("resources", [])]
    found = [r["values"] for r in resources if r["type"] == kind]
    assert found, kind
    return found


def statements(plan: dict[str, Any], kind: str, field: str = "policy") -> list[dict[str, Any]]:
    return [statement for values in planned(plan, kind) for statement in json.loads(values[field])["Statement"]]


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def test_no_bucket_is_public(plan: dict[str, Any]) -> None:
    buckets = {values["bucket"] for values in planned(plan, "aws_s3_bucket")}
    blocks = planned(plan, "aws_s3_bucket_public_access_block")
    switches = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert len(blocks) == len(buckets) == 2
    assert all(block[switch] is True for block in blocks for switch in switches)
    assert all(statement["Effect"] == "Deny" for statement in statements(plan, "aws_s3_bucket_policy"))


def test_buckets_are_encrypted_and_answer_only_with_tls(plan: dict[str, Any]) -> None:
    for values in planned(plan, "aws_s3_bucket_server_side_encryption_configuration"):
        [rule] = values["rule"]
        assert rule["apply_server_side_encryption_by_default"][0]["sse_algorithm"] in ("AES256", "aws:kms")
    conditions = [statement["Condition"] for statement in statements(plan, "aws_s3_bucket_policy")]
    assert conditions == [{"Bool": {"aws:SecureTransport": "false"}}] * 2


def test_no_action_is_a_wildcard_and_no_resource_is_everything(plan: dict[str, Any]) -> None:
    for statement in statements(plan, "aws_iam_role_policy"):
        actions = listed(statement["Action"])
        assert statement["Effect"] == "Allow"
        assert not any("*" in action for action in actions), statement
        if "*" in listed(statement["Resource"]):
            assert set(actions) <= UNLIMITED, statement


def test_workers_write_results_kernels_and_their_log(plan: dict[str, Any]) -> None:
    reading = ("Get", "List", "Describe", "Connect")
    workers = [values for values in planned(plan, "aws_iam_role_policy") if "/kernels/*" in values["policy"]]
    assert len(workers) == sum("-pool-" in values["name"] for values in planned(plan, "aws_iam_role"))
    for values in workers:
        writing = [
            statement
            for statement in json.loads(values["policy"])["Statement"]
            if not all(action.partition(":")[2].startswith(reading) for action in listed(statement["Action"]))
        ]
        where = {
            arn.rpartition(":")[2].partition("/")[2] for s in writing if s["Sid"] == "Write" for arn in s["Resource"]
        }
        assert where == {f"store/{payloads.RESULTS}*", f"store/{kernel_store.PREFIX}/*"}
        assert {statement["Sid"] for statement in writing} == {"Write", "Log"}


def test_hosts_read_their_own_deployments_secrets(plan: dict[str, Any]) -> None:
    for values in planned(plan, "aws_iam_role_policy"):
        reading = [s for s in json.loads(values["policy"])["Statement"] if "secretsmanager" in "".join(s["Action"])]
        [secrets] = reading
        assert secrets["Action"] == ["secretsmanager:GetSecretValue"]
        names = {arn.rpartition(":")[2] for arn in secrets["Resource"]}
        assert {name for name in names if "key-seed" in name} == {f"{deployment_of(plan)}-key-seed-??????"}
        assert len(names) <= 2 and not names & {"*", "secret"}


def deployment_of(plan: dict[str, Any]) -> str:
    [name] = {v["name"].partition("-pool-")[0] for v in planned(plan, "aws_autoscaling_group") if "-pool-" in v["name"]}
    return name


def test_scaling_is_limited_to_this_deployments_pools(plan: dict[str, Any]) -> None:
    [scale] = [s for s in statements(plan, "aws_iam_role_policy") if "autoscaling:SetDesiredCapacity" in s["Action"]]
    name = deployment_of(plan)
    assert all(arn.endswith(f":autoScalingGroupName/{name}-pool-*") for arn in scale["Resource"])
    assert scale["Condition"] == {"StringEquals": {"aws:ResourceTag/stoker:cluster": name}}


def test_only_ec2_may_be_these_roles(plan: dict[str, Any]) -> None:
    for statement in statements(plan, "aws_iam_role", "assume_role_policy"):
        assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}


def test_nothing_but_the_load_balancer_lets_anyone_in(plan: dict[str, Any]) -> None:
    for values in planned(plan, "aws_vpc_security_group_ingress_rule"):
        assert values["cidr_ipv6"] is None and values["prefix_list_id"] is None
        # The address of the NAT gateway is not known yet.
        if values.get("cidr_ipv4", "unknown") is not None:
            assert (values["from_port"], values["to_port"], values["ip_protocol"]) == (443, 443, "tcp")
            assert values.get("cidr_ipv4") != "0.0.0.0/0"
    for values in planned(plan, "aws_security_group"):
        assert not values.get("ingress")
    assert all(values["map_public_ip_on_launch"] is not True for values in planned(plan, "aws_subnet"))


def test_callers_are_served_with_tls_only(plan: dict[str, Any]) -> None:
    for values in planned(plan, "aws_lb_listener"):
        assert values["protocol"] == "HTTPS"
        assert values["ssl_policy"].startswith("ELBSecurityPolicy-TLS13-1-2")


def test_hosts_keep_their_credentials_and_their_disks_to_themselves(plan: dict[str, Any]) -> None:
    for values in planned(plan, "aws_launch_template"):
        [metadata] = values["metadata_options"]
        assert (metadata["http_tokens"], metadata["http_put_response_hop_limit"]) == ("required", 1)
        assert metadata["http_protocol_ipv6"] == "disabled"
        disks = [disk for mapping in values["block_device_mappings"] for disk in mapping["ebs"]]
        assert disks and all(disk["encrypted"] == "true" and disk["volume_type"] == "gp3" for disk in disks)
        assert not values["key_name"] and not values["network_interfaces"]


def test_pools_start_at_nothing_and_lose_no_busy_host(plan: dict[str, Any]) -> None:
    pools = [values for values in planned(plan, "aws_autoscaling_group") if "-pool-" in values["name"]]
    assert all(pool["min_size"] == 0 and pool["protect_from_scale_in"] for pool in pools)
    assert all(hook["name"] == "stoker-drain" for pool in pools for hook in pool["initial_lifecycle_hook"])


def test_the_cache_has_a_user_without_a_password(plans: dict[str, dict[str, Any]]) -> None:
    for values in planned(plans["minimal"], "aws_elasticache_user"):
        assert values["authentication_mode"] == [{"passwords": None, "type": "iam"}]
        assert not values["passwords"] and not values["no_password_required"]
