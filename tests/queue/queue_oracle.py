"""Looks at the server's keys from outside, through no code of the queue, and says which invariants don't hold."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgpack
import redis

LIVE = {"queued", "retrying", "running"}
PERMANENT_SUFFIXES = {"m", "v", "w", "use"}


def function_keys(client: redis.Redis, function: str) -> dict[str, str]:
    """Key -> what comes behind the hash tag."""
    prefix = f"stoker:q:{{{function}}}:"
    return {key: key[len(prefix) :] for key in (raw.decode() for raw in client.scan_iter(count=1000)) if prefix in key}


@dataclass
class Snapshot:
    """Everything stored for one function, by kind."""

    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    tenant_lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    ready: dict[str, dict[str, float]] = field(default_factory=dict)
    zsets: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    dead: set[str] = field(default_factory=set)
    standing: set[str] = field(default_factory=set)
    waiting: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    usage: list[dict[str, str]] = field(default_factory=list)
    virtual_times: dict[str, str] = field(default_factory=dict)
    ttls: dict[str, int] = field(default_factory=dict, compare=False)


def snapshot(client: redis.Redis, function: str) -> Snapshot:
    shot = Snapshot()
    names = function_keys(client, function)
    for (_, suffix), kind, ttl, value in zip(names.items(), *read_all(client, list(names)), strict=True):
        shot.ttls[suffix] = ttl
        if suffix.startswith("j:"):
            shot.jobs[suffix[2:]] = text_map(value)
        elif suffix.startswith("l:"):
            shot.lanes[suffix] = scores(value)
        elif suffix.startswith("tl:"):
            shot.tenant_lanes[suffix] = scores(value)
        elif suffix.startswith("r:"):
            shot.ready[suffix[2:]] = scores(value)
        elif suffix == "dead":
            shot.dead = set(scores(value))
        elif suffix == "st":
            shot.standing = set(scores(value))
        elif kind == b"zset":
            shot.zsets[suffix] = scores(value)
        elif suffix == "tq":
            shot.waiting = {name: int(count) for name, count in text_map(value).items()}
        elif suffix == "tr":
            shot.running = {name: int(count) for name, count in text_map(value).items()}
        elif suffix == "v":
            shot.virtual_times = text_map(value)
        elif suffix == "use":
            shot.usage = [text_map(fields) for _, fields in value]
    return shot


def read_all(client: redis.Redis, names: list[str]) -> tuple[list[bytes], list[int], list[Any]]:
    """Types, TTLs and values in two round trips."""
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.type(name)
            pipeline.pttl(name)
        facts = pipeline.execute()
        kinds, ttls = facts[::2], facts[1::2]
        for name, kind in zip(names, kinds, strict=True):
            if kind == b"hash":
                pipeline.hgetall(name)
            elif kind == b"zset":
                pipeline.zrange(name, 0, -1, withscores=True)
            elif kind == b"stream":
                pipeline.xrange(name)
            else:
                pipeline.exists(name)
        return kinds, ttls, pipeline.execute()


def text_map(value: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): data.decode(errors="replace") for name, data in value.items()}


def scores(value: list[tuple[bytes, float]]) -> dict[str, float]:
    return {member.decode(): score for member, score in value}


class Oracle:
    """Remembers the fences and terminal events it has seen; `check` raises with every broken invariant."""

    def __init__(self, client: redis.Redis, gateway: str = "") -> None:
        self._client = client
        self._fences: dict[str, int] = {}
        self._ends: Counter[str] = Counter()
        self._pubsub = client.pubsub()
        self._pubsub.subscribe(f"stoker:gateway:{gateway}")

    def close(self) -> None:
        self._pubsub.close()

    def ends(self) -> Counter[str]:
        while message := self._pubsub.get_message(timeout=0):
            frames = msgpack.unpackb(message["data"], raw=True) if message["type"] == "message" else []
            self._ends.update(frame[1].decode() for frame in frames if frame[0] == b"end")
        return self._ends

    def check(self, function: str) -> Snapshot:
        shot = snapshot(self._client, function)
        problems = [
            *one_place(shot),
            *self._fences_rise(shot),
            *counters(shot),
            *kept_aside(shot),
            *ready_lanes(shot),
            *attempts(shot),
            *expiry(shot),
            *payloads(shot),
            *dead_letters(shot),
            *self._one_end(shot),
        ]
        assert not problems, "\n".join(problems)
        return shot

    def _fences_rise(self, shot: Snapshot) -> list[str]:
        problems = []
        for job_id, row in shot.jobs.items():
            fence, before = int(row.get("fence", 0)), self._fences.get(job_id, 0)
            if fence < before:
                problems.append(f"I2: fence of {job_id} fell from {before} to {fence}")
            self._fences[job_id] = fence
        held = [row["fence"] for row in shot.jobs.values() if "fence" in row]
        return problems + (["I2: two jobs share a fence"] if len(set(held)) < len(held) else [])

    def _one_end(self, shot: Snapshot) -> list[str]:
        ended = {job_id for job_id, row in shot.jobs.items() if row["state"] not in LIVE}
        usage = Counter(row["job"] for row in shot.usage if "late" not in row)
        ends = self.ends()
        problems = []
        for job_id, row in shot.jobs.items():
            # A replayed job has ended before.
            expected = int(row.get("replays", 0)) + (job_id in ended)
            if usage[job_id] != expected:
                problems.append(f"I4: {job_id} has {usage[job_id]} usage records, not {expected}")
            if ends[job_id] != expected and (row.get("gates") or ends[job_id] > expected):
                problems.append(f"I4: {job_id} has {ends[job_id]} end events, not {expected}")
        return problems


def one_place(shot: Snapshot) -> list[str]:
    """I1: a live job is in one lane, the leases or the delays, as its state says; an ended one in none."""
    problems = []
    in_lanes = Counter(job_id for lane in shot.lanes.values() for job_id in lane)
    for job_id, row in shot.jobs.items():
        places = ["lane"] * in_lanes[job_id]
        places += [name for name in ("lease", "delay") if job_id in shot.zsets[name]]
        allowed = {"running": [["lease"]], "queued": [["lane"], ["delay"]], "retrying": [["lane"], ["delay"]]}
        if places not in allowed.get(row["state"], [[]]):
            problems.append(f"I1: {row['state']} job {job_id} is in {places}")
        if row["state"] not in LIVE and job_id in shot.zsets["dl"]:
            problems.append(f"I1: ended job {job_id} has a deadline")
    known = {job_id for place in ("lease", "delay", "dl", "q") for job_id in shot.zsets[place]} | set(in_lanes)
    return problems + [f"I1: {job_id} is somewhere without a record" for job_id in known - shot.jobs.keys()]


def counters(shot: Snapshot) -> list[str]:
    """I3: the list of queued jobs is the sum of the lanes; the tenants' counts are what waits and runs."""
    in_lanes = {job_id: place for lane in shot.lanes.values() for job_id, place in lane.items()}
    problems = [] if in_lanes == shot.zsets["q"] else ["I3: the list of queued jobs differs from the lanes"]
    waits = set(in_lanes) | set(shot.zsets["delay"])
    counts = Counter(shot.jobs[job_id]["tenant"] for job_id in waits)
    problems += [] if counts == shot.waiting else [f"I3: tenants wait {dict(counts)}, counted {shot.waiting}"]
    runs = Counter(shot.jobs[job_id]["tenant"] for job_id in shot.zsets["lease"])
    return problems + ([] if runs == shot.running else [f"I3: tenants run {dict(runs)}, counted {shot.running}"])


def kept_aside(shot: Snapshot) -> list[str]:
    """I8: listed as kept are exactly the leased jobs whose present worker said so."""
    kept = {id for id, row in shot.jobs.items() if row["state"] == "running" and row.get("aside") == row["fence"]}
    listed = set(shot.zsets["aside"])
    return [] if kept == listed else [f"I8: workers keep {kept}, listed {listed}"]


def ready_lanes(shot: Snapshot) -> list[str]:
    """I7: a lane is listed, by its head, exactly when it holds something, and so is its tenant."""
    heads: dict[str, dict[str, float]] = defaultdict(dict)
    ready: dict[str, set[str]] = defaultdict(set)
    for lane in shot.lanes.values():
        first = min(lane, key=lambda job_id: lane[job_id])
        row = shot.jobs[first]
        heads[f"tl:{row.get('priority', '1')}:{row['tenant']}"][row.get("batch", "")] = lane[first]
        ready[row.get("priority", "1")].add(row["tenant"])
    problems = [] if heads == shot.tenant_lanes else [f"I7: lane heads {dict(heads)}, listed {shot.tenant_lanes}"]
    listed = {priority: set(tenants) for priority, tenants in shot.ready.items()}
    return problems + ([] if ready == listed else [f"I7: ready {dict(ready)}, listed {listed}"])


def attempts(shot: Snapshot) -> list[str]:
    return [
        f"I5: {job_id} is in attempt {row['attempt']} of {row.get('max', 3)}"
        for job_id, row in shot.jobs.items()
        if int(row.get("attempt", 0)) > int(row.get("max", 3))
    ]


def expiry(shot: Snapshot) -> list[str]:
    """I6: whatever belongs to an ended job has a TTL, whatever belongs to a live one has none."""
    problems = []
    for suffix, ttl in shot.ttls.items():
        kind, _, job_id = suffix.partition(":")
        if kind in ("j", "p", "o", "s"):
            live = shot.jobs.get(job_id, {}).get("state") in LIVE
            if live != (ttl == -1):
                problems.append(f"I6: {suffix} of a {'live' if live else 'ended'} job has TTL {ttl}")
    return problems


def payloads(shot: Snapshot) -> list[str]:
    """A payload is kept for live jobs and for those that can be replayed."""
    kept = {suffix[2:] for suffix in shot.ttls if suffix.startswith("p:")}
    wanted = {job_id for job_id, row in shot.jobs.items() if row["state"] in LIVE | {"dead", "failed"}}
    return [f"payload kept or lost: {job_id}" for job_id in kept ^ wanted]


def dead_letters(shot: Snapshot) -> list[str]:
    wanted = {job_id for job_id, row in shot.jobs.items() if row["state"] == "dead"}
    return [f"dead letter listed or not: {job_id}" for job_id in shot.dead ^ wanted]


def leaks(client: redis.Redis, permanent: set[str]) -> list[str]:
    """Keys without a TTL that no rule allows; call it when every job has ended."""
    found = []
    for key in (raw.decode() for raw in client.scan_iter(count=1000)):
        suffix = key.rpartition("}:")[2] if key.startswith("stoker:q:") else ""
        if client.pttl(key) == -1 and key not in permanent and suffix not in PERMANENT_SUFFIXES:
            found.append(key)
    return found
