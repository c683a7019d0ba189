-- Takes a request's place in all of a tenant's limits, or, when one has too little, in none.
-- KEYS: meta, spent this month. ARGV: id, tokens, cost in micro-USD, TTL in ms, requests per minute, tokens per minute,
-- concurrency, budget in micro-USD (0 = no limit), TTL of the month in ms, 1 when it is early: tokens and cost aren't
-- known yet, and are taken, with no second request, when the id comes again.
-- Answers {limit, most, retry after ms, then of each rate: most, what is left of it now, ms until it is full, and at
-- last what is left of a budget that is the limit}, the first of them '' when all had enough and the rates' 0 where there
-- is no limit. The rates are buckets that hold a minute's worth and fill steadily (the generic cell rate algorithm, ITU-T
-- I.371); reservations end by themselves, in case nobody lives to settle them.
local call = redis.call
local META, SPENT = KEYS[1], KEYS[2]
local id, tokens, cost, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local rates = { { 'requests_per_minute', 1, tonumber(ARGV[5]) }, { 'tokens_per_minute', tokens, tonumber(ARGV[6]) } }
local concurrency, budget = tonumber(ARGV[7]), tonumber(ARGV[8])
local LIVE, HELD, RESERVED, EARLY = META .. ':live', META .. ':held', META .. ':reserved', META .. ':early'
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local MINUTE = 60000

-- With the limit that the bucket was made for: when that was raised, what is missing comes back sooner.
local function until_full(key, most)
  local at, size = string.match(call('GET', key) or '', '^(%S+) (%S+)$')
  return at and math.max(tonumber(at) - NOW, 0) * math.min(tonumber(size) / most, 1) or 0
end

local function answer(limit, most, wait, rest)
  local reply = { limit, most, wait }
  for _, rate in ipairs(rates) do
    local name, _, size = unpack(rate)
    local filling = size > 0 and until_full(META .. ':' .. name, size) or 0
    local left = math.max(0, 1 - filling / MINUTE) * size
    for _, number in ipairs({ size, math.floor(left), math.ceil(filling) }) do
      table.insert(reply, string.format('%.17g', number))
    end
  end
  table.insert(reply, rest or '0')
  return reply
end

for _, gone in ipairs(call('ZRANGEBYSCORE', HELD, '-inf', NOW)) do
  call('ZREM', HELD, gone)
  call('HDEL', RESERVED, gone)
  call('SREM', EARLY, gone)
end
call('ZREMRANGEBYSCORE', LIVE, '-inf', NOW)
local early, placed = ARGV[10] == '1', call('SISMEMBER', EARLY, id) == 1
if call('ZSCORE', HELD, id) and (early or not placed) then
  return answer('', '0', 0)
end
if concurrency > 0 and not placed and call('ZCARD', LIVE) >= concurrency then
  return answer('concurrency', ARGV[7], 1000)
end
if budget > 0 then
  local held = tonumber(call('GET', SPENT) or 0) - (placed and tonumber(call('HGET', RESERVED, id) or 0) or 0)
  for _, amount in ipairs(call('HVALS', RESERVED)) do
    held = held + tonumber(amount)
  end
  if held + cost > budget then
    return answer('budget_usd', ARGV[8], tonumber(ARGV[9]), string.format('%.0f', math.max(budget - held, 0)))
  end
end
local full_at = {}
for _, rate in ipairs(rates) do
  local name, amount, most = unpack(rate)
  local taken_before = placed and name == 'requests_per_minute'
  if most > 0 and not taken_before then
    local key = META .. ':' .. name
    local filling, taken = until_full(key, most), amount * MINUTE / most
    local wait = filling + math.min(taken, MINUTE) - MINUTE
    if wait > 0 then
      return answer(name, tostring(most), math.ceil(wait))
    end
    full_at[key] = { NOW + filling + taken, most }
  end
end
for key, bucket in pairs(full_at) do
  local at = math.max(bucket[1], NOW + 1)
  call('SET', key, string.format('%.0f %.17g', at, bucket[2]), 'PXAT', string.format('%.0f', at))
end
call('ZADD', LIVE, NOW + ttl, id)
call('ZADD', HELD, NOW + ttl, id)
call('HSET', RESERVED, id, cost)
call(early and 'SADD' or 'SREM', EARLY, id)
for _, key in ipairs({ LIVE, HELD, RESERVED, EARLY }) do
  if call('PTTL', key) < ttl then
    call('PEXPIRE', key, ttl)
  end
end
return answer('', '0', 0)
