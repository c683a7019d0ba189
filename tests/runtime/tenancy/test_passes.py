"""Keys of functions that run: they call for their owner, and end without anybody's doing."""

from redis.asyncio import Redis

from stoker.runtime.tenancy.api_key import OPERATOR, Keyring, parse
from stoker.runtime.tenancy.directory import PASS_PREFIX, Directory
from stoker.runtime.tenancy.passes import LASTS_S, Passes

SECRET = "the secret of this deployment"


async def test_a_pass_is_a_key_of_its_owner_that_may_only_invoke(tenants: Directory, redis: Redis) -> None:
    for owner, tenant in (("shop", "shop"), ("", OPERATOR)):
        issued = await Passes(tenants, SECRET).issue(owner)
        assert issued is not None
        key_id, secret = parse(issued.text) or ("", "")
        record = await tenants.key(key_id)
        assert record is not None and Keyring(SECRET).opens(secret, record)
        assert (record.tenant, record.scopes) == (tenant, ("invoke",))
        assert 0 < await redis.pttl(PASS_PREFIX + key_id) <= LASTS_S * 1000
        assert await tenants.keys_of(tenant) == []


async def test_it_ends_with_its_replica_or_when_nobody_renews_it(tenants: Directory, redis: Redis) -> None:
    passes = Passes(tenants, SECRET)
    ended, lost = await passes.issue("shop"), await passes.issue("shop")
    assert ended is not None and lost is not None
    await passes.end(ended)
    assert await tenants.key(ended.record.id) is None
    await redis.pexpire(PASS_PREFIX + lost.record.id, 1_000)
    await passes.renew(lost)
    assert await redis.pttl(PASS_PREFIX + lost.record.id) > 1_000


async def test_a_host_without_the_deployments_secret_makes_none(tenants: Directory) -> None:
    assert await Passes(tenants, "").issue("shop") is None
