import asyncio
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import JobState

from .conftest import BODY_LIMIT
from .peers import Deploy, double, error_of, until_state, worker, write_bundle


async def put_bundle(http: httpx.AsyncClient, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    response = await http.put(f"/v1/bundles/{digest}", content=data)
    assert response.status_code == 201
    assert response.json() == {"object": "bundle", "sha256": digest, "bytes": len(data)}
    return digest


async def test_bundle_function_call_and_removal(
    http: httpx.AsyncClient, broker: Broker, store: ObjectStore, tmp_path: Path
) -> None:
    data = write_bundle(tmp_path)
    digest = await put_bundle(http, data)
    assert store.read(f"bundles/{digest}.zip") == data
    spec = {"kind": "python", "app": "shop", "code": digest, "entry": "m:f", "scaling": {"max_replicas": 2}}
    first = await http.put("/v1/functions/doubled", json={"spec": spec})
    again = await http.put("/v1/functions/doubled", json={"spec": {**spec, "name": "doubled"}})
    changed = await http.put("/v1/functions/doubled", json={"spec": {**spec, "concurrency": 2}})
    assert [response.status_code for response in (first, again, changed)] == [201, 200, 200]
    assert first.json()["version"] == again.json()["version"] != changed.json()["version"]
    assert first.json()["spec"]["scaling"]["max_replicas"] == 2
    assert (first.json()["kind"], first.json()["queued"], first.json()["replicas"]) == ("python", 0, {})
    async with worker(broker, "doubled", double):
        assert (await http.post("/v1/functions/doubled", json=2)).json() == 4
    listed = (await http.get("/v1/functions")).json()["data"]
    assert "doubled" in [function["name"] for function in listed]
    waiting = (await http.post("/v1/functions/doubled/jobs", json=2)).json()["id"]
    gone = (await http.delete("/v1/functions/doubled")).json()
    assert gone == {"object": "function", "name": "doubled", "deleted": True, "cancelled_jobs": 1}
    await until_state(broker, waiting, JobState.CANCELLED)
    for method in ("GET", "DELETE", "POST"):
        assert (await http.request(method, "/v1/functions/doubled")).status_code == 404


@pytest.mark.parametrize(
    ("limit", "retry_after"),
    [
        ("max_queued", "60"),
        ("max_queued_per_tenant", "60"),
        ("requests_per_minute", "60"),
        ("requests_per_minute_per_tenant", "60"),
        ("cost_per_minute_per_tenant", "60"),
    ],
)
async def test_queue_limits_come_with_the_deployment(
    http: httpx.AsyncClient, cluster: Cluster, tmp_path: Path, limit: str, retry_after: str
) -> None:
    digest = await put_bundle(http, write_bundle(tmp_path))
    spec = {"kind": "python", "code": digest, "entry": "m:f", "limits": {limit: 1}}
    await http.put(f"/v1/functions/{limit}", json={"spec": spec})
    answers = [await http.post(f"/v1/functions/{limit}/jobs", json=1) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 429]
    assert answers[1].headers["retry-after"] == retry_after
    assert error_of(answers[1])["code"] == "rate_limit_exceeded"
    assert limit in error_of(answers[1])["message"]
    await http.delete(f"/v1/functions/{limit}")


@pytest.mark.real_model
async def test_a_language_model_needs_readable_weights(
    http: httpx.AsyncClient, smollm2_store_url: str, tmp_path: Path
) -> None:
    missing = (tmp_path / "nothing").as_uri()
    response = await http.put("/v1/functions/chat", json={"spec": {"kind": "llm", "weights": missing}})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, "spec.weights", "ObjectMissing")
    assert "config.json" in error["message"] and str(tmp_path) in error["message"]
    unknown = await http.put("/v1/functions/chat", json={"spec": {"kind": "llm", "weights": "ftp://x"}})
    assert (unknown.status_code, error_of(unknown)["param"]) == (400, "spec.weights")
    spec, before = {"kind": "llm", "weights": smollm2_store_url}, int(time.time())
    assert (await http.put("/v1/functions/chat", json={"spec": spec})).status_code == 201
    models = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert before <= models["chat"]["created"] <= time.time()
    newer = {**spec, "concurrency": 2}
    assert (await http.put("/v1/functions/chat", json={"spec": newer})).status_code == 200
    assert (await http.get("/v1/models/chat")).json() == models["chat"]
    assert (await http.delete("/v1/functions/chat")).status_code == 200


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [
        ("llm", {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM' is no language model"),
        ("llm", {"architectures": ["BertModel"]}, "BertModel' is no language model"),
        ("embed", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM' is no text encoder"),
        ("llm", {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
    ],
)
async def test_models_that_cannot_be_served_are_refused_by_name(
    http: httpx.AsyncClient, tmp_path: Path, kind: str, config: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    response = await http.put("/v1/functions/odd", json={"spec": {"kind": kind, "weights": tmp_path.as_uri()}})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, "spec.weights", "UnsupportedModel")
    assert named in error["message"]


@pytest.mark.real_model
async def test_what_a_deployment_read_serves_the_first_requests(
    http: httpx.AsyncClient, broker: Broker, smollm2_store_url: str, tmp_path: Path
) -> None:
    """The store may even be gone by then."""
    shutil.copytree(smollm2_store_url.removeprefix("file://"), tmp_path / "model")
    spec = {"kind": "llm", "weights": (tmp_path / "model").as_uri()}
    assert (await http.put("/v1/functions/kept", json={"spec": spec})).status_code == 201
    shutil.rmtree(tmp_path / "model")
    job = await http.post("/v1/functions/kept/jobs", json={"prompt": "Once"})
    assert job.status_code == 202
    await http.delete("/v1/functions/kept")


SHA = "ab" * 32
PYTHON = {"kind": "python", "code": SHA, "entry": "m:f"}


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("f", {}, "spec"),
        ("f", {"spec": 5}, "spec"),
        ("f", {"spec": {**PYTHON, "name": "other"}}, "spec.name"),
        ("Bad-Name", {"spec": PYTHON}, "spec"),
        ("f", {"spec": {"kind": "llm"}}, "spec"),
        ("f", {"spec": {**PYTHON, "kind": "magic"}}, "spec.kind"),
        ("f", {"spec": {**PYTHON, "colour": "red"}}, "spec"),
        ("f", {"spec": {**PYTHON, "concurrency": "many"}}, "spec.concurrency"),
        ("f", {"spec": {**PYTHON, "concurrency": 0}}, "spec"),
        ("f", {"spec": {**PYTHON, "scaling": {"min_replicas": "x"}}}, "spec.scaling.min_replicas"),
        ("f", {"spec": {**PYTHON, "scaling": {"least": 1}}}, "spec"),
        ("f", {"spec": {**PYTHON, "scaling": None}}, "spec.scaling"),
        ("f", {"spec": {**PYTHON, "batch": {"max_size": 0}}}, "spec"),
        ("f", {"spec": {**PYTHON, "slo": {"ttft_ms": -1e9}}}, "spec"),
        ("f", {"spec": {**PYTHON, "limits": {"retention_s": 0}}}, "spec"),
        ("f", {"spec": {**PYTHON, "entry": "no colon"}}, "spec.entry"),
        ("f", {"spec": {**PYTHON, "code": "../../etc/passwd"}}, "spec.code"),
        ("f", {"spec": PYTHON}, "spec.code"),
        ("f", {"spec": {"kind": "embed", "weights": "file:///w"}}, "spec.weights"),
    ],
)
async def test_bad_specs_are_400_and_name_the_field(
    http: httpx.AsyncClient, name: str, body: dict[str, Any], param: str
) -> None:
    response = await http.put(f"/v1/functions/{name}", json=body)
    assert response.status_code == 400
    assert (error_of(response)["param"] or "").startswith(param)
    assert (await http.get(f"/v1/functions/{name}")).status_code == 404


async def test_bundles_are_checked(http: httpx.AsyncClient, store: ObjectStore, tmp_path: Path) -> None:
    data = write_bundle(tmp_path)
    wrong = await http.put(f"/v1/bundles/{SHA}", content=data)
    assert (wrong.status_code, error_of(wrong)["code"]) == (400, "digest_mismatch")
    assert (await http.put("/v1/bundles/short", content=data)).status_code == 400
    text = b"no zip"
    bad = await http.put(f"/v1/bundles/{hashlib.sha256(text).hexdigest()}", content=text)
    assert (bad.status_code, error_of(bad)["code"]) == (400, "invalid_bundle")
    big = b"x" * (BODY_LIMIT + 1)
    large = await http.put(f"/v1/bundles/{hashlib.sha256(big).hexdigest()}", content=big)
    assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")
    assert not list(store.list(f"bundles/{SHA}"))


async def until_rollout(http: httpx.AsyncClient, name: str, expected: Any) -> None:
    """What the gateway knows of the cluster is up to a second old."""
    async with asyncio.timeout(10):
        while (found := (await http.get(f"/v1/functions/{name}")).json()["rollout"]) != expected:
            assert found is None or expected is None
            await asyncio.sleep(0.05)


async def test_a_version_that_does_not_start_is_told_with_the_one_that_serves(
    http: httpx.AsyncClient, cluster: Cluster, deploy: Deploy
) -> None:
    name, other = await deploy(version="v2"), await deploy(version="v2")
    told = {"version": "v2", "serving": "v1", "error": "no such module"}
    await cluster.report_fleet({"rollouts": {name: told, other: {**told, "serving": ""}}})
    await until_rollout(http, name, told)
    await until_rollout(http, other, {**told, "serving": None})
    listed = {function["name"]: function for function in (await http.get("/v1/functions")).json()["data"]}
    assert listed[name]["rollout"] == told
    await cluster.report_fleet({"rollouts": {name: {**told, "version": "v1"}}})
    await until_rollout(http, other, None)
    assert (await http.get(f"/v1/functions/{name}")).json()["rollout"] is None, "that was another version"
    await cluster.report_fleet({})
