"""Where a function's replica runs: a folder of its own with a copy of its code, its home and its temporary files, and,
where the agent is root, a user of its own. A replica takes one of the machine's numbered places while it lives."""

import fcntl
import os
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PLACES = 4096
FIRST_UID = 1_900_000_000
KILL_ROUNDS = 10
KEPT = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "REQUESTS_CA_BUNDLE"),
)
KEPT_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_")
NEEDED = {0: "CAP_CHOWN", 1: "CAP_DAC_OVERRIDE", 5: "CAP_KILL", 6: "CAP_SETGID", 7: "CAP_SETUID"}


class NoPlace(OSError):
    """This machine has no folder for another replica."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """`uid` is 0 where the function runs as the worker's own user."""

    folder: Path
    uid: int
    _lock: int

    @property
    def code(self) -> Path:
        return self.folder / "code"

    def environment(self) -> dict[str, str]:
        """What a function inherits of the worker's environment, and where it may write. Its libraries must not take
        the machine's own cloud credentials either."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
        home, scratch = str(self.folder / "home"), str(self.folder / "tmp")
        return {**kept, "HOME": home, "TMPDIR": scratch, "AWS_EC2_METADATA_DISABLED": "true"}

    def leave(self) -> None:
        """Ends whatever still runs as its user and removes the folder. Blocking."""
        if self.uid:
            end_processes_of(self.uid)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def take_place(bundle: Path) -> Workplace:
    """With a copy of the bundle, so that no replica can change another's code. Blocking; raises NoPlace, OSError."""
    root = places_folder()
    own_users = can_switch_users()
    for number in range(PLACES):
        lock = try_lock(root / f"{number}.lock")
        if lock is None:
            continue
        uid = FIRST_UID + number if own_users else 0
        try:
            return furnish(root / str(number), bundle, uid, lock)
        except BaseException:
            os.close(lock)
            raise
    raise NoPlace(f"all {PLACES} places for replicas under {root} are taken")


def furnish(folder: Path, bundle: Path, uid: int, lock: int) -> Workplace:
    """What a replica whose agent was killed left here goes first."""
    if uid:
        end_processes_of(uid)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    shutil.copytree(bundle, folder / "code")
    for name in ("home", "tmp"):
        (folder / name).mkdir(mode=0o700)
    if uid:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)
    return Workplace(folder, uid, lock)


def places_folder() -> Path:
    """One for all agents that run as this user. Others may pass through it to their own folder, not look around.
    Raises NoPlace when somebody else made it first."""
    root = Path(tempfile.gettempdir()) / f"stoker-functions-{os.geteuid()}"
    with suppress(FileExistsError):
        root.mkdir(mode=0o711)
    facts = root.lstat()
    if facts.st_uid != os.geteuid() or not stat.S_ISDIR(facts.st_mode):
        raise NoPlace(f"{root} is not a folder of this worker's user: remove it, or set TMPDIR to another folder")
    root.chmod(0o711)
    return root


def try_lock(path: Path) -> int | None:
    """Held until its descriptor is closed, by whatever end of this process; None: another replica has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def can_switch_users() -> bool:
    """Whether processes started here can run as users of their own, and these can read the Python that they run."""
    return not why_users_are_shared()


def why_users_are_shared() -> str:
    """Why functions run as the worker's user; "" where they have users of their own."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can give functions users of their own"
    capabilities = int(status_field("CapEff"), 16)
    if missing := [name for bit, name in NEEDED.items() if not capabilities >> bit & 1]:
        return f"this root lacks {', '.join(missing)}"
    if not any(maps_uids(line) for line in Path("/proc/self/uid_map").read_text().splitlines()):
        return f"the user namespace has no users {FIRST_UID} to {FIRST_UID + PLACES - 1}"
    code = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parent, Path(tempfile.gettempdir()))
    closed = next((folder for path in code if (folder := closed_folder(path))), None)
    return f"other users can't enter {closed}, where Python, stoker or the temporary files are" if closed else ""


def status_field(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def maps_uids(line: str) -> bool:
    first, _, count = (int(part) for part in line.split())
    return first <= FIRST_UID and first + count >= FIRST_UID + PLACES


def closed_folder(path: Path) -> Path | None:
    """The first folder on the way to `path`, links followed, or that itself, that not every user may enter."""
    resolved = path.resolve()
    way = (*reversed(resolved.parents), resolved)
    return next((folder for folder in way if not folder.stat().st_mode & stat.S_IXOTH), None)


def end_processes_of(uid: int) -> None:
    """Those that left the replica's session too. Several times: one may be forking while the others are killed."""
    for _ in range(KILL_ROUNDS):
        left = [process for process in psutil.process_iter() if runs_as(process, uid)]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def runs_as(process: psutil.Process, uid: int) -> bool:
    try:
        return process.uids().real == uid and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
