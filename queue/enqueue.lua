-- uses: | common lanes standing rates buckets
-- Accepts a job once, or refuses it without a trace.
-- Answers {ok, id, created, wake, queued, state}, {mismatch, id}, {full, limit, waiting, most, retry after ms},
-- {rate, limit, most, retry after ms}, or, to a caller that didn't just name a new or purged function in the list of
-- functions, {unlisted}.
local RETRY_AFTER_LEAST, RETRY_AFTER_MOST = 1000, 60000

local id, tenant, payload, priority, cost, batch, max, stream = unpack(ARGV, 1, 8)
local gateway, idem, digest = unpack(ARGV, 9, 11)
local start_within, run_within, finish_within = tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14])
local keep, delay, weight = ARGV[15], tonumber(ARGV[16]), tonumber(ARGV[17])
local listed = ARGV[18]

local function accepted(job_id, created, state, wake, queued)
  return { 'ok', job_id, created, tonumber(wake or 0), queued or call('ZCARD', Q .. 'q'), state }
end

local function known()
  local mine = call('HMGET', record(id), 'state', 'wake')
  if mine[1] then
    return accepted(id, 1, mine[1], mine[2])
  end
  local used = idem ~= '' and call('GET', Q .. 'i:' .. idem)
  if not used then
    return nil
  end
  local split = string.find(used, ':', 1, true)
  local other = string.sub(used, 1, split - 1)
  local state = call('HGET', record(other), 'state')
  if not state then
    return nil
  end
  if string.sub(used, split + 1) ~= digest then
    return { 'mismatch', other }
  end
  return accepted(other, 0, state)
end

-- The time in which a twentieth of the limit drains: whoever comes back then finds room, not one slot. When no worker is
-- awake, at the rate that the last ones had, and behind the time that a worker's start takes.
local function refused(limit, waiting, most)
  local asleep = call('EXISTS', Q .. 'lease', STANDING) == 0
  local wait = math.ceil(most / 20) / per_second('drained', asleep) * 1000
  if not (wait < RETRY_AFTER_MOST) then
    wait = RETRY_AFTER_MOST
  end
  wait = math.max(math.floor(wait), RETRY_AFTER_LEAST)
  if asleep then
    wait = wait + (call('HGET', META, 'cold_start') or 0)
  end
  return { 'full', limit, waiting, most, wait }
end

local function check_limits(queued, meta)
  local most = tonumber(meta[1] or 100000)
  local waiting = queued + call('ZCARD', Q .. 'delay')
  if most > 0 and waiting >= most then
    return refused('max_queued', waiting, most)
  end
  local tenant_most = tonumber(meta[2] or 0)
  local tenant_waiting = tenant_most > 0 and tonumber(call('HGET', Q .. 'tq', tenant) or 0) or 0
  if tenant_most > 0 and tenant_waiting >= tenant_most then
    return refused('max_queued_per_tenant', tenant_waiting, tenant_most)
  end
end

local function store(place, wake, state, ...)
  local fields = {
    'state', state, 'tenant', tenant, 'priority', priority, 'cost', cost, 'max', max, 'place', place, 'keep', keep,
    'enqueued', NOW, ...
  }
  local function add(name, value, wanted)
    if wanted then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  add('batch', batch, batch ~= '')
  add('stream', 1, stream == '1')
  add('gates', gateway, gateway ~= '')
  add('idem', idem, idem ~= '')
  add('run', run_within, run_within > 0)
  add('finish_by', NOW + finish_within, finish_within > 0)
  add('wake', 1, wake)
  call('HSET', record(id), unpack(fields))
  call('SET', Q .. 'p:' .. id, payload)
  if idem ~= '' then
    call('SET', Q .. 'i:' .. idem, id .. ':' .. digest)
  end
end

local function set_deadline()
  local deadline = math.huge
  if start_within > 0 then
    deadline = NOW + start_within
  end
  if finish_within > 0 then
    deadline = math.min(deadline, NOW + finish_within)
  end
  if deadline < math.huge then
    call('ZADD', Q .. 'dl', deadline, id)
  end
end

-- As the worker of a standing claim is told of its job. Answers whether it listens.
local function told(worker, origin, number, fence)
  local row = { id, tenant, payload, fence, 1, tonumber(max), tonumber(stream), gateway, NOW, NOW, run_within, {} }
  return call('PUBLISH', 'stoker:handover:' .. worker, cmsgpack.pack({ origin, number, row })) > 0
end

-- To the claim that has stood longest and whose worker still listens, in one step with it. Answers who took it.
local function taker(fence)
  while true do
    local entry = call('ZPOPMIN', STANDING)
    if not entry[1] then
      call('HDEL', META, 'standing')
      return nil
    end
    local origin, number, lease, worker = string.match(entry[1], '^(%S+) (%S+) (%S+) (.*)$')
    if tonumber(entry[2]) > NOW and told(worker, origin, number, fence) then
      return { worker = worker, origin = origin, number = number, lease = lease }
    end
  end
end

local function start(to, place, fence, floor)
  local value = math.max(tonumber(call('HGET', Q .. 'v', tenant) or 0), floor)
  store(place, false, 'running', 'fence', integer(fence), 'attempt', 1, 'worker', to.worker, 'began', NOW)
  call('ZADD', Q .. 'lease', NOW + to.lease, id)
  count_running(tenant, 1)
  call('HSET', Q .. 'v', tenant, value + cost / weight_of(tenant))
  call('HSET', META, 'fence', integer(fence), 'vtime', value)
  remember_claim(to.origin, to.number, to.lease, ' ' .. id .. ' ' .. integer(fence))
  local deadline = math.min(run_within > 0 and NOW + run_within or math.huge,
    finish_within > 0 and NOW + finish_within or math.huge)
  if deadline < math.huge then
    call('ZADD', Q .. 'dl', deadline, id)
  end
end

-- What a claim would do that came behind this job: whether one that stands takes it.
local function hand_over(place)
  local row = call('HMGET', META, 'fence', 'vtime')
  local fence = math.max(tonumber(row[1] or 0), NOW_US) + 1
  local to = taker(fence)
  if to then
    start(to, place, fence, tonumber(row[2] or 0))
  end
  return to
end

local reply = known()
if reply then
  return reply
end
local queued = call('ZCARD', Q .. 'q')
local meta = call('HMGET', META, 'limit', 'tenant_limit', 'place', 'paced', 'standing', 'run_limit', 'tenant_run_limit',
  rate_fields('arrived'))
if not meta[3] and listed == '0' then
  return { 'unlisted' }
end
reply = check_limits(queued, meta) or (meta[4] == '1' and pace(tenant, tonumber(cost)))
if reply then
  return reply
end
set_weight(tenant, weight)
if not meta[3] then
  call('PERSIST', Q .. 'use')
end
local wake = queued == 0 and delay == 0
local place = (meta[3] or 0) + 1
add_to_rate('arrived', 1, meta[8], meta[9], meta[10], 'place', place)
local limited = tonumber(meta[6] or 0) > 0 or tonumber(meta[7] or 0) > 0
if meta[5] and wake and not limited and hand_over(place) then
  return accepted(id, 1, 'running', 0, 0)
end
store(place, wake, 'queued')
set_deadline()
count_waiting(tenant, 1)
if delay > 0 then
  call('ZADD', Q .. 'delay', NOW + delay, id)
else
  queued = queued + 1
  push({ id = id, tenant = tenant, priority = priority, batch = batch, place = place }, queued)
end
return accepted(id, 1, 'queued', wake and 1 or 0, queued)
