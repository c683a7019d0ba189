"""What hosts are told at their first boot: from the plans, the way cloud-init gets it."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terraform_runs import ROOT
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.worker.workplace import FIRST_UID, PLACES

pytestmark = [pytest.mark.xdist_group("terraform"), pytest.mark.timeout(300)]

FILES = ROOT / "terraform" / "modules" / "host" / "files"
# The Python of the tests may be its user's alone.
OPEN = "from stoker.runtime.worker import workplace; workplace.closed_folder = lambda path: None; "
# A replica's place is made, its process starts as its user, is looked at and ended, and the place goes.
LIFE_OF_A_FUNCTION = """
import pathlib, psutil, subprocess, sys, tempfile
from stoker.runtime.worker.memory_watch import own_bytes
from stoker.runtime.worker.workplace import take_place
with tempfile.TemporaryDirectory() as bundle:
    place = take_place(pathlib.Path(bundle))
    assert place.uid
    start = f"import os; os.setresuid(*[{place.uid}] * 3); open('{place.folder}/tmp/mine', 'w').close()"
    command = [sys.executable, "-c", start + "; print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"\\n" and own_bytes(child.pid) > 1 << 20
    place.leave()
    assert not psutil.pid_exists(child.pid) and not place.folder.exists()
"""
Files = dict[str, dict[str, str]]
USERS = [0, FIRST_UID - 1, FIRST_UID, FIRST_UID + PLACES - 1, FIRST_UID + PLACES]
# Which of these users can connect to the instance metadata's address.
CONNECT = """
import json, os, socket, sys
listener = socket.create_server(("169.254.169.254", 80))
reached = []
for uid in map(int, sys.argv[1:]):
    os.seteuid(uid)
    reached.append(socket.socket().connect_ex(("169.254.169.254", 80)) == 0)
    os.seteuid(0)
print(json.dumps(reached))
"""


def hosts_of(plan: dict[str, Any], example: str) -> dict[str, Files]:
    """The files of each kind of host, by path."""
    hosts: dict[str, Files] = {}
    for module in plan["planned_values"]["root_module"]["child_modules"][0]["child_modules"]:
        for resource in module.get("resources", []):
            data = resource["values"].get("user_data")
            if resource["type"] == "aws_launch_template" and data:
                hosts[f"{example}:{resource['values']['name']}"] = files_of(data)
    return hosts


def files_of(data: str) -> Files:
    head, body = base64.b64decode(data).decode().split("\n", 1)
    assert head == "#cloud-config"
    assert len(base64.b64decode(data)) <= 16384
    return {file["path"]: file for file in json.loads(body)["write_files"]}


@pytest.fixture(scope="module")
def hosts(plans: dict[str, dict[str, Any]]) -> dict[str, Files]:
    found = hosts_of(plans["complete"], "complete")
    assert len(found) == 5
    return found


def is_worker(host: str) -> bool:
    return "-pool-" in host


def environment(files: Files, path: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in files[path]["content"].splitlines())


def test_units_are_valid(hosts: dict[str, Files], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on the PATH")
    for name, files in hosts.items():
        unit = tmp_path / name.rpartition(":")[2] / "stoker.service"
        unit.parent.mkdir()
        # Programs that are only there on a host would be found missing.
        text = files["/etc/systemd/system/stoker.service"]["content"]
        unit.write_text(re.sub(r"^(Exec\w+=[-+]*)\S+", r"\1/bin/true", text, flags=re.M))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        about = [line for line in (done.stdout + done.stderr).splitlines() if "stoker.service" in line]
        assert not about, about


def test_a_worker_that_must_go_is_given_time_to_drain(hosts: dict[str, Files]) -> None:
    from stoker.runtime.worker.agent import DRAIN_S

    pool = (ROOT / "terraform/modules/worker_pool/main.tf").read_text()
    heartbeat = int(re.findall(r"heartbeat_timeout\s*=\s*(\d+)", pool)[0])
    for files in hosts.values():
        unit = files["/etc/systemd/system/stoker.service"]["content"]
        assert "KillSignal=SIGTERM" in unit and "KillMode=mixed" in unit and "Restart=always" in unit
        [limit] = re.findall(r"TimeoutStopSec=(\d+)", unit)
        assert DRAIN_S < int(limit) < heartbeat


def test_stoker_knows_the_commands_that_units_run(hosts: dict[str, Files]) -> None:
    started = set()
    for files in hosts.values():
        unit = files["/etc/systemd/system/stoker.service"]["content"]
        [arguments] = re.findall(r"^ExecStart=\S+/stoker (.*)$", unit, flags=re.M)
        command, *options = arguments.split()
        started.add(command)
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        assert all(option in shown for option in options if option.startswith("--")), (command, shown)
    assert started == {"gateway", "controller", "worker"}


def test_hosts_have_the_settings_that_stoker_reads(hosts: dict[str, Files], monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.runtime.settings import from_environment

    for name, files in hosts.items():
        given = environment(files, "/etc/stoker/stoker.env")
        for variable, value in given.items():
            monkeypatch.setenv(variable, value)
        settings = from_environment()
        assert settings.store == "s3://stoker-prod-artifacts-123456789012-eu-central-1/store", name
        assert settings.data_dir == Path("/var/lib/stoker")
        assert given["STOKER_CLUSTER"] == "stoker-prod" and given["AWS_REGION"] == "eu-central-1"
        assert given.get("STOKER_URL") == ("https://llm.example.com" if is_worker(name) else None)


def test_no_secret_is_in_user_data(hosts: dict[str, Files]) -> None:
    for name, files in hosts.items():
        fetched = dict(line.split() for line in files["/etc/stoker/secrets"]["content"].splitlines())
        assert fetched["STOKER_SECRET"] == "stoker-prod-key-seed" and "STOKER_REDIS" in fetched, name
        assert not {"STOKER_REDIS", "STOKER_SECRET"} & set(environment(files, "/etc/stoker/stoker.env"))


def test_only_workers_are_root_and_give_functions_users_of_their_own(hosts: dict[str, Files]) -> None:
    for name, files in hosts.items():
        unit = files["/etc/systemd/system/stoker.service"]["content"]
        [user] = re.findall(r"^User=(.*)$", unit, flags=re.M)
        assert user == ("root" if is_worker(name) else "stoker")
        assert environment(files, "/etc/stoker/bootstrap.env")["SERVICE_USER"] == user
        assert f"stoker-disk /var/lib/stoker {user}\n" in unit
        assert ("why_users_are_shared" in unit) == is_worker(name) == ("/usr/local/bin/stoker-metadata" in files)
        if is_worker(name):
            uids = f"{FIRST_UID}-{FIRST_UID + PLACES - 1}"
            assert f"\nExecStartPre=+/usr/local/bin/stoker-metadata {uids}\n" in unit


def test_a_workers_capabilities_are_enough(hosts: dict[str, Files]) -> None:
    """For what the agent does with functions' users; in the sandbox of the unit, where that can be had."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give rights away")
    unit = hosts["complete:stoker-prod-pool-l40s"]["/etc/systemd/system/stoker.service"]["content"]
    [check] = re.findall(r'^ExecStartPre=\S+/python -c "(.*)"$', unit, flags=re.M)
    [names] = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, flags=re.M)
    kept = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names.split())])
    sandbox = ["setpriv", "--no-new-privs", f"--bounding-set={kept}"]
    # A folder that everybody may enter, which the tests' own isn't.
    env = {**os.environ, "TMPDIR": os.environ["PYTEST_DEBUG_TEMPROOT"]}
    for script in (check, LIFE_OF_A_FUNCTION):
        subprocess.run([*sandbox, sys.executable, "-c", OPEN + script], env=env, check=True)
    fewer = ["setpriv", "--no-new-privs", f"--bounding-set={kept.replace(',+setuid', '')}"]
    refused = subprocess.run([*fewer, sys.executable, "-c", OPEN + check], capture_output=True, text=True)
    assert "this root lacks CAP_SETUID" in refused.stderr


def test_functions_can_not_reach_the_instance_metadata(tmp_path: Path) -> None:
    """The host's own script, in a network of its own where everybody can connect to that address before it ran."""
    if os.geteuid() != 0 or shutil.which("nft") is None:
        pytest.skip("needs root and nft")
    ready = "ip link set lo up && ip address add 169.254.169.254/32 dev lo"
    script = f"bash {FILES / 'metadata.sh'} {FIRST_UID}-{FIRST_UID + PLACES - 1}"
    connect = f"{sys.executable} -c '{CONNECT}' {' '.join(map(str, USERS))}"
    body = "\n".join([ready, connect, script, script, connect])
    done = subprocess.run(["unshare", "--net", "bash", "-ec", body], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads(line) for line in done.stdout.splitlines())
    assert before == [True] * len(USERS)
    assert after == [user not in USERS[2:4] for user in USERS]


@pytest.mark.parametrize("script", sorted(path.name for path in FILES.glob("*.sh")))
def test_scripts_parse_and_end_at_a_failure(script: str) -> None:
    subprocess.run(["bash", "-n", FILES / script], check=True)
    assert (FILES / script).read_text().splitlines()[0] == "#!/bin/bash"
    assert "set -euo pipefail" in (FILES / script).read_text()


@pytest.fixture
def boot(tmp_path: Path, release: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs boot.sh on a machine of stubs: /etc, /opt and /var are folders of the test, programs log their calls."""
    shutil.copytree(release, tmp_path / "bucket")
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for program in ("useradd", "dnf", "systemctl", "amazon-cloudwatch-agent-ctl", "python3.12", "install"):
        write_program(stubs / program, f'echo "{program} $*" >>{tmp_path}/calls')
    write_program(stubs / "aws", f'cp -r {tmp_path}/bucket/. "{tmp_path}/opt/stoker/release/"')
    write_program(stubs / "curl", f'case "$*" in *tags*) echo l4 ;; *lifecycle*) cat {tmp_path}/lifecycle ;; esac')
    write_program(tmp_path / "opt/stoker/venv/bin/pip", f'echo "pip $*" >>{tmp_path}/calls')
    write_program(tmp_path / "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl", "true")
    for folder in ("etc/stoker", "opt/stoker/release"):
        (tmp_path / folder).mkdir(parents=True)

    def run(role: str, digest: str, lifecycle: str = "InService") -> subprocess.CompletedProcess[str]:
        (tmp_path / "lifecycle").write_text(lifecycle)
        (tmp_path / "etc/stoker/bootstrap.env").write_text(
            f"ROLE={role}\nSERVICE_USER=nobody\nRELEASE_URL=s3://b/r\nRELEASE_DIGEST={digest}\n"
        )
        script = re.sub(r"(?<![\w.:/])/(etc|opt|var)/", rf"{tmp_path}/\1/", (FILES / "boot.sh").read_text())
        path = f"{stubs}:{os.environ['PATH']}"
        return subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True)

    return run


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def disk(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs disk.sh where `mounted` is a mount point and `disks` are what lsblk lists; the calls that matter."""
    stubs = tmp_path / "bin"
    for program in ("mount", "mdadm", "mkfs.xfs", "install"):
        write_program(stubs / program, f'echo "{program} $*" >>{tmp_path}/calls\n[ ! -e {tmp_path}/broken-{program} ]')
    write_program(stubs / "mountpoint", f'grep -qx "$2" {tmp_path}/mounted')
    write_program(stubs / "lsblk", f"cat {tmp_path}/disks")

    def run(mounted: str, disks: int, accept: int = 0) -> list[str]:
        (tmp_path / "mounted").write_text(f"{mounted}\n")
        local = [f"/dev/nvme{n + 1}n1 Amazon EC2 NVMe Instance Storage" for n in range(disks)]
        (tmp_path / "disks").write_text("\n".join(["/dev/nvme0n1 Amazon Elastic Block Store", *local, ""]))
        script = (FILES / "disk.sh").read_text().replace("/opt/dlami", f"{tmp_path}/dlami")
        path = f"{stubs}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script, "disk", tmp_path / "data", "nobody"], env={"PATH": path}, capture_output=True
        )
        assert done.returncode == accept, done.stderr
        calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
        return [line for line in calls.replace(str(tmp_path), "").splitlines() if not line.startswith("install")]

    return run


def test_local_disks_are_striped(disk: Callable[..., list[str]]) -> None:
    assert disk("/", 2) == [
        "mdadm --stop --scan",
        "mdadm --create /dev/md0 --level=0 --force --run --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
        "mkfs.xfs -q -f -K /dev/md0",
        "mount -o noatime /dev/md0 /data",
    ]


def test_a_single_disk_none_and_one_that_is_mounted(disk: Callable[..., list[str]], tmp_path: Path) -> None:
    assert disk("/", 0) == []
    assert disk(f"{tmp_path}/data", 2) == []
    assert disk("/", 1) == ["mkfs.xfs -q -f -K /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 /data"]


def test_disks_that_the_image_mounted_are_taken_as_they_are(disk: Callable[..., list[str]], tmp_path: Path) -> None:
    assert disk(f"{tmp_path}/dlami/nvme", 2) == ["mount --bind /dlami/nvme/stoker /data"]


def test_a_disk_that_fails_ends_the_start(disk: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "broken-mkfs.xfs").touch()
    assert "mount" not in " ".join(disk("/", 1, accept=1))


def test_secrets_go_into_memory_readable_by_nobody_else(tmp_path: Path) -> None:
    for folder in ("etc/stoker", "run/stoker"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/stoker/stoker.env").write_text("AWS_REGION=eu-central-1\n")
    (tmp_path / "etc/stoker/secrets").write_text("STOKER_REDIS arn:one\nSTOKER_SECRET seed\n")
    write_program(tmp_path / "bin/aws", 'echo "value of $6 in $4"')
    script = re.sub(
        r" ?(?<![\w.:!])/(etc|run)/", lambda m: m[0].replace("/", f"{tmp_path}/", 1), (FILES / "secrets.sh").read_text()
    )
    for _ in range(2):
        subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, check=True)
    written = tmp_path / "run/stoker/secrets.env"
    assert written.read_text() == (
        'STOKER_REDIS="value of arn:one in eu-central-1"\nSTOKER_SECRET="value of seed in eu-central-1"\n'
    )
    assert written.stat().st_mode & 0o777 == 0o600


def digest_of(release: Path) -> str:
    return subprocess.check_output(["sha256sum", release / "SHA256SUMS"], text=True).split()[0]


@pytest.mark.parametrize(
    ("role", "packages"), [("worker", "worker"), ("gateway", "control"), ("controller", "control")]
)
def test_a_host_installs_its_release_and_starts(
    boot: Callable[..., Any], tmp_path: Path, release: Path, role: str, packages: str
) -> None:
    done = boot(role, digest_of(release))
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert f"-r requirements-{packages}.txt" in calls and "--no-deps ./stoker-0.1.0-py3-none-any.whl" in calls
    assert "systemctl start stoker.service" in calls
    pool = tmp_path / "etc/stoker/stoker.env"
    assert (pool.read_text() if pool.exists() else "") == ("STOKER_POOL=l4\n" if role == "worker" else "")


@pytest.mark.parametrize("altered", ["SHA256SUMS", "stoker-0.1.0-py3-none-any.whl", "constraints.txt"])
def test_an_altered_release_is_not_installed(
    boot: Callable[..., Any], tmp_path: Path, release: Path, altered: str
) -> None:
    with (tmp_path / "bucket" / altered).open("a") as file:
        file.write("x")
    assert boot("worker", digest_of(release)).returncode != 0
    calls = (tmp_path / "calls").read_text()
    assert "pip" not in calls and "systemctl" not in calls


def test_a_host_put_by_does_not_start(boot: Callable[..., Any], tmp_path: Path, release: Path) -> None:
    assert boot("worker", digest_of(release), "Warmed:Stopped").returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert "systemctl enable stoker.service" in calls
    assert "systemctl start" not in calls
