-- uses: | common lanes standing rates buckets
-- Accepts each job once, or refuses it without a trace. In the order in which they are given.
-- ARGV: whether the caller just named the function in the list of functions (1, 0), then for each job: id, tenant,
-- payload, priority, cost, batch key, most attempts, stream (1, 0), gateway, limit of a run in ms (0 = none), retention
-- in ms, and what else it has ('' = nothing): a msgpack map of idem, digest, start, finish, delay (in ms), weight, hook,
-- route and caller.
-- Answers for each: how many are queued then, if the job is now one of them and wakes nobody; else {ok, id, created,
-- wake, queued, state}, {mismatch, id}, {full, limit, waiting, most, retry after ms},
-- {rate, limit, most, retry after ms}, or, to a caller that didn't just name a new or purged function in the list of
-- functions, {unlisted}.
local RETRY_AFTER_LEAST, RETRY_AFTER_MOST = 1000, 60000
local PARTS = 12
-- What a record has of its job, unless it is as usual: then a reader knows it (see jobs.lua).
local FIELDS = {
  'priority', 'cost', 'max', 'keep', 'batch', 'stream', 'gates', 'run', 'idem', 'hook', 'route', 'finish_by', 'wake',
  'caller',
}
local USUAL = { priority = '1', cost = '1.0', max = '3', keep = '3600000', batch = '', gates = '' }

local listed = ARGV[1] == '1'
local meta = call('HMGET', META, 'limit', 'tenant_limit', 'place', 'paced', 'standing', 'run_limit', 'tenant_run_limit',
  rate_fields('arrived'))
local limit, tenant_limit, place = tonumber(meta[1] or 100000), tonumber(meta[2] or 0), tonumber(meta[3] or 0)
local paced, standing = meta[4] == '1', meta[5]
local limited = tonumber(meta[6] or 0) > 0 or tonumber(meta[7] or 0) > 0
local before, queued, delayed = place, call('ZCARD', Q .. 'q'), call('ZCARD', Q .. 'delay')
-- What the jobs of this call change together: their lanes and payloads, tenants' counts, and tenants' weights as far as
-- known.
local lanes, last_lane, in_order, payloads = {}, nil, {}, {}
local waiting, weights, deadlines = {}, {}, {}
-- Standing claims that get jobs of this call, all of one tenant; the last fence, the tenant's virtual time and the one
-- at which its last job was served.
local takers, fence, virtual, floor = {}, nil, nil, nil

local function read_job(i)
  local id, tenant, payload, priority, cost, batch, max, stream, gates, run, keep, rest = unpack(ARGV, i, i + PARTS - 1)
  local job = {
    id = id, record = record(id), tenant = tenant, payload = payload, priority = priority, cost = cost, batch = batch,
    max = max, stream = stream == '1' and 1 or nil, gates = gates, run = run ~= '0' and run or nil, keep = keep,
  }
  if rest ~= '' then
    for name, value in pairs(cmsgpack.unpack(rest)) do
      job[name] = value
    end
    job.finish_by = job.finish and NOW + job.finish
  end
  return job
end

local function accepted(id, created, state, wake)
  return { 'ok', id, created, tonumber(wake or 0), queued, state }
end

local function of_same_key(job)
  local used = call('GET', Q .. 'i:' .. job.idem)
  local other, digest = string.match(used or '', '^([^:]*):(.*)$')
  local row = other and call('HMGET', record(other), 'state', 'aside', 'fence')
  if not row or not row[1] then
    return nil
  end
  return digest == (job.digest or '') and accepted(other, 0, shown_state(unpack(row))) or { 'mismatch', other }
end

local function known(job)
  if call('EXISTS', job.record) == 1 then
    local mine = call('HMGET', job.record, 'wake', 'state', 'aside', 'fence')
    return accepted(job.id, 1, shown_state(unpack(mine, 2)), mine[1])
  end
  return job.idem and of_same_key(job)
end

-- The time in which a twentieth of the limit drains: whoever comes back then finds room, not one slot. When no worker is
-- awake, at the rate that the last ones had, and behind the time that a worker's start takes.
local function refused(name, count, most)
  local asleep = call('EXISTS', Q .. 'lease', STANDING) == 0
  local wait = math.ceil(most / 20) / per_second(asleep, read_rate('drained')) * 1000
  if not (wait < RETRY_AFTER_MOST) then
    wait = RETRY_AFTER_MOST
  end
  wait = math.max(math.floor(wait), RETRY_AFTER_LEAST)
  if asleep then
    wait = wait + (call('HGET', META, 'cold_start') or 0)
  end
  return { 'full', name, count, most, wait }
end

local function check_limits(job)
  if limit > 0 and queued + delayed >= limit then
    return refused('max_queued', queued + delayed, limit)
  end
  if tenant_limit > 0 then
    local count = tonumber(call('HGET', Q .. 'tq', job.tenant) or 0) + (waiting[job.tenant] or 0)
    if count >= tenant_limit then
      return refused('max_queued_per_tenant', count, tenant_limit)
    end
  end
  return paced and pace(job.tenant, tonumber(job.cost))
end

local function weigh(job)
  local weight = tonumber(job.weight or 1)
  if weights[job.tenant] ~= weight then
    set_weight(job.tenant, weight)
    weights[job.tenant] = weight
  end
end

-- `...`: more fields of its record.
local function store(job, state, ...)
  local fields, last = { ... }, select('#', ...)
  for i = 1, #FIELDS do
    local name = FIELDS[i]
    local value = job[name]
    if value and value ~= USUAL[name] then
      fields[last + 1], fields[last + 2] = name, value
      last = last + 2
    end
  end
  call('HSET', job.record, 'state', state, 'tenant', job.tenant, 'place', place, 'enqueued', NOW, unpack(fields))
  payloads[#payloads + 1] = Q .. 'p:' .. job.id
  payloads[#payloads + 1] = job.payload
  if job.idem then
    call('SET', Q .. 'i:' .. job.idem, job.id .. ':' .. (job.digest or ''))
  end
end

local function set_deadline(job, within)
  local deadline = math.min(within and NOW + within or math.huge, job.finish_by or math.huge)
  if deadline < math.huge then
    deadlines[#deadlines + 1], deadlines[#deadlines + 2] = deadline, job.id
  end
end

-- As the worker of a standing claim is told of its job.
local function row_of(job)
  return {
    job.id, job.tenant, job.payload, fence, 1, tonumber(job.max), job.stream or 0, job.gates, NOW, NOW,
    tonumber(job.run or 0), {}, tonumber(job.priority), weights[job.tenant],
  }
end

local function has_one_tenant()
  for i = 2 + PARTS, #ARGV, PARTS do
    if ARGV[i + 1] ~= ARGV[3] then
      return false
    end
  end
  return true
end

-- The claim that has stood longest and whose worker still listens. Jobs of several tenants are for a claim to choose
-- from, so that of those it takes only one.
local function next_taker(job)
  while true do
    local entry = call('ZPOPMIN', STANDING)
    if not entry[1] then
      standing = nil
      call('HDEL', META, 'standing')
      return nil
    end
    local origin, number, room, lease, worker = string.match(entry[1], '^(%S+) (%S+) (%S+) (%S+) (.*)$')
    local channel = 'stoker:handover:' .. worker
    -- An empty message tells whether it listens; PUBSUB NUMSUB isn't on every managed server.
    if tonumber(entry[2]) > NOW and call('PUBLISH', channel, '') > 0 then
      return {
        origin = origin, number = number, lease = lease, worker = worker, channel = channel, batch = job.batch,
        room = has_one_tenant() and tonumber(room) or 1, first = fence + 1, ids = {}, rows = {}, leases = {},
      }
    end
  end
end

local function taker(job)
  local last = takers[#takers]
  if last and #last.ids < last.room then
    return last.batch == job.batch and last
  end
  if not fence then
    local row = call('HMGET', META, 'fence', 'vtime')
    fence = math.max(tonumber(row[1] or 0), NOW_US)
    virtual = math.max(tonumber(call('HGET', Q .. 'v', job.tenant) or 0), tonumber(row[2] or 0))
  end
  local to = (not last or has_one_tenant()) and next_taker(job)
  takers[#takers + 1] = to or nil
  return to
end

-- What a claim would do that came behind this job: whether one that stands takes it.
local function hand_over(job)
  local to = taker(job)
  if not to then
    return false
  end
  fence = fence + 1
  store(job, 'running', 'fence', fence, 'attempt', 1, 'worker', to.worker, 'began', NOW)
  set_deadline(job, job.run)
  floor, virtual = virtual, virtual + job.cost / weights[job.tenant]
  local count = #to.ids + 1
  to.ids[count], to.rows[count] = job.id, row_of(job)
  to.leases[2 * count - 1], to.leases[2 * count] = NOW + to.lease, job.id
  return true
end

local function tell_takers()
  if not takers[1] then
    return
  end
  local tenant, count = takers[1].rows[1][2], 0
  for _, to in ipairs(takers) do
    count = count + #to.ids
    call('ZADD', Q .. 'lease', unpack(to.leases))
    remember_claim(to.origin, to.number, to.lease, to.first, table.concat(to.ids, ' '))
    call('PUBLISH', to.channel, cmsgpack.pack({ to.origin, to.number, to.rows }))
  end
  count_running(tenant, count)
  call('HSET', Q .. 'v', tenant, virtual)
  call('HSET', META, 'fence', fence, 'vtime', floor)
end

local function lane_of(job)
  local lane = last_lane
  if lane and lane.batch == job.batch and lane.tenant == job.tenant and lane.priority == job.priority then
    return lane
  end
  local key = lane_key(job.priority, job.tenant, job.batch)
  lane = lanes[key]
  if not lane then
    local first = call('EXISTS', key) == 0
    lane = { key = key, priority = job.priority, tenant = job.tenant, batch = job.batch, first = first, places = {} }
    lanes[key] = lane
  end
  last_lane = lane
  return lane
end

local function wait_in_lane(job)
  local places = lane_of(job).places
  local last, all = #places, #in_order
  places[last + 1], places[last + 2] = place, job.id
  in_order[all + 1], in_order[all + 2] = place, job.id
  queued = queued + 1
end

local function accept(job)
  weigh(job)
  place = place + 1
  local wake = queued == 0 and not job.delay
  -- Work of the lowest priority has limits of its own, which only its claims know.
  if standing and wake and not limited and job.priority ~= '2' and hand_over(job) then
    return accepted(job.id, 1, 'running', 0)
  end
  job.wake = wake and 1 or nil
  store(job, 'queued')
  set_deadline(job, job.start)
  waiting[job.tenant] = (waiting[job.tenant] or 0) + 1
  if job.delay then
    delayed = delayed + 1
    call('ZADD', Q .. 'delay', NOW + job.delay, job.id)
  else
    wait_in_lane(job)
  end
  return wake and accepted(job.id, 1, 'queued', 1) or queued
end

local function enqueue(job)
  local reply = known(job)
  if reply then
    return reply
  elseif place == 0 and not listed then
    return { 'unlisted' }
  end
  return check_limits(job) or accept(job)
end

-- Workers are told when there was nothing in the lanes, or of the first job of a lane that goes before work they may
-- have left.
local function fill_lanes()
  local bell = queued * 2 == #in_order
  for key, lane in pairs(lanes) do
    call('ZADD', key, unpack(lane.places))
    if lane.first then
      list_lane(lane.priority, lane.tenant, lane.batch, lane.places[1])
      bell = bell or tonumber(lane.priority) < 2
    end
  end
  if in_order[1] then
    call('ZADD', Q .. 'q', unpack(in_order))
    if bell then
      ring()
    end
  end
end

local replies = {}
for i = 2, #ARGV, PARTS do
  replies[#replies + 1] = enqueue(read_job(i))
end
if place > before then
  if before == 0 then
    call('PERSIST', Q .. 'use')
  end
  add_to_rate('arrived', place - before, meta[8], meta[9], meta[10], 'place', place)
  for tenant, count in pairs(waiting) do
    count_waiting(tenant, count)
  end
  call('MSET', unpack(payloads))
  if deadlines[1] then
    call('ZADD', Q .. 'dl', unpack(deadlines))
  end
  tell_takers()
  fill_lanes()
end
return replies
