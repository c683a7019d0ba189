"""Every key and channel of the queue. All keys of a function share the hash tag {function}, so they share one slot.

Jobs (`*` = job id); live ones have no TTL, from the terminal state on all have the job's retention:
    j:*  hash    the record (small fields only)         p:*  string  payload, kept of ended jobs if DEAD or FAILED
    o:*  string  outcome: result, error, usage, notes   s:*  stream  chunks, made by the first chunk
                                                        (id: the attempt's fence and the chunk's number)
    i:<digest>  string  idempotency key -> job id and request digest

Functions:
    m        hash    sequence, fence, virtual time, limits, rates, activity, time of a cold start (permanent)
    q        zset    every job in a lane -> its place in the sequence
    l:<priority>:<length>:<tenant>:<batch key>  zset  one lane, in sequence
    tl:<priority>:<tenant>  zset  a tenant's non-empty lanes -> their head's place
    r:<priority>  zset  tenants with a non-empty lane -> their virtual time
    v, w, tq, tr  hash  tenant -> virtual time, weight (permanent), jobs waiting (queued and delayed), jobs running
    b:r, b:c, b:r:<tenant>, b:c:<tenant>  string  when a bucket is full again, and its limit (TTL: until then)
    lease, dl, delay  zset  job -> end of lease, next deadline, due time (server milliseconds)
    aside    zset    leased jobs that their workers keep and don't run -> their place in the sequence
    w:<job>.<life>  hash  whom to tell of an end of the job (TTL: a week), with what to say once that was tried in vain
    wl:<job>.<life> list  each try (same TTL)
    wd       zset    <job>.<life> -> when its next try is due, or until when it is leased (TTL: a week)
    dead     zset    jobs that are DEAD, by id (TTL: the longest retention among them)
    c:<origin>  string  the last claim with tickets of that origin, for a replay (TTL: the lease)
    st       zset    claims that found no work -> until when they stand (TTL: until the last of them ends)
    use      stream  usage records, bounded (permanent until the function is purged)
"""

import hashlib

PREFIX = "stoker:q:"
FUNCTIONS = "stoker:queues"
DELETED = "stoker:queues:deleted"
GATEWAY_CHANNEL = "stoker:gateway:"
WORKER_CHANNEL = "stoker:worker:"
BELL_CHANNEL = "stoker:bell:"
HANDOVER_CHANNEL = "stoker:handover:"
DELIVERY_BELL = "stoker:hooks"
DELIVERY_KEPT_S = 7 * 24 * 3600

PERMANENT_SUFFIXES = frozenset({"m", "v", "w", "use"})
PERMANENT = frozenset({FUNCTIONS})


def function_prefix(function: str) -> str:
    return f"{PREFIX}{{{function}}}:"


def function_at(prefix: str) -> str:
    return prefix.removeprefix(PREFIX)[1:-2]


def meta(function: str) -> str:
    return function_prefix(function) + "m"


def key(function: str, suffix: str) -> str:
    return function_prefix(function) + suffix


def chunks(function: str, job_id: str) -> str:
    return f"{function_prefix(function)}s:{job_id}"


def gateway_channel(gateway: str) -> str:
    return GATEWAY_CHANNEL + gateway


def worker_channel(worker: str) -> str:
    return WORKER_CHANNEL + worker


def bell_channel(function: str) -> str:
    return BELL_CHANNEL + function


def handover_channel(worker: str) -> str:
    return HANDOVER_CHANNEL + worker


def is_permanent(name: str) -> bool:
    """Whether a key may exist without a TTL although no job is live."""
    return name in PERMANENT or (name.startswith(PREFIX) and name.rpartition("}:")[2] in PERMANENT_SUFFIXES)


def idempotency_digest(tenant: str, idempotency_key: str) -> str:
    """Unambiguous, of bounded length, and says nothing about the client's key. "" when there is none."""
    if not idempotency_key:
        return ""
    parts = f"{len(tenant)}:{tenant}{idempotency_key}".encode()
    return hashlib.blake2b(parts, digest_size=16).hexdigest()
