-- uses: allow-oom | common jobs chunks outbox lanes leaving finish standing
-- ARGV: worker, origin and number of the ticket, number of a stand that nothing was heard of ('' = none) and its limit,
-- limit, lease ms, for how many ms the claim stands when there is no work, how many jobs of the lowest priority may come
-- on top of the limit, which then isn't for them (-1: it is), and tenants that are passed over (msgpack; '' = none).
-- Answers a row for each claimed job; the same ticket gets the same jobs again.
local worker, origin, number, unheard, unheard_room = unpack(ARGV, 1, 5)
local limit, lease_ms, stand_ms = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local lease = NOW + tonumber(lease_ms)
local apart, lowest_most, lowest_taken = tonumber(ARGV[9]) >= 0, math.max(tonumber(ARGV[9]), 0), 0
local others_most = limit
limit = limit + lowest_most
-- A priority that was passed over so often, with work waiting, is served next: urgent work comes first, never alone.
local AGEING = 8
local DUTIES = 64
local TENANTS = math.max(limit, 64)

local function row_of(job, payload)
  local chunks = job.stream and job.past and call('XRANGE', Q .. 's:' .. job.id, '-', '+') or {}
  return {
    job.id, job.tenant, payload, tonumber(job.fence), job.attempt, tonumber(job.max), job.stream and 1 or 0, job.gates,
    tonumber(job.since or job.enqueued), tonumber(job.began), tonumber(job.run or 0), chunks, tonumber(job.priority),
    tostring(job.weight or weight_of(job.tenant)),
  }
end

local function answer(jobs)
  local names, rows = {}, {}
  for i, job in ipairs(jobs) do
    names[i] = Q .. 'p:' .. job.id
  end
  local payloads = jobs[1] and call('MGET', unpack(names))
  for i, job in ipairs(jobs) do
    rows[i] = row_of(job, payloads[i])
  end
  return rows
end

-- The jobs of a claim have fences in a row.
local function repeat_answer(first, ids)
  local held, fence = {}, tonumber(first)
  for id in string.gmatch(ids, '%S+') do
    local job = read(id)
    if holds(job, integer(fence)) then
      call('ZADD', Q .. 'lease', 'XX', lease, id)
      held[#held + 1] = job
    end
    fence = fence + 1
  end
  return answer(held)
end

local meta = call('HMGET', META, 'fence', 'vtime', 'passes:1', 'passes:2', 'run_limit', 'tenant_run_limit',
  'standing')
-- Never below the clock: a server that lost its last writes can't hand out a fence twice.
local fence = math.max(tonumber(meta[1] or 0), NOW_US)
local floor = tonumber(meta[2] or 0)
local passes = { 0, tonumber(meta[3] or 0), tonumber(meta[4] or 0) }
local levels, virtual, weights, batch, overdue = {}, {}, {}, nil, false
local queued, claimed, leases, deadlines = 0, {}, {}, {}
-- Whether jobs may have a deadline from before, and those of the claimed ones that have none any more.
local timed, endless = false, {}
local run_most, tenant_run_most = tonumber(meta[5] or 0), tonumber(meta[6] or 0)
local passed = {}
if ARGV[#ARGV] ~= '' then
  for _, name in ipairs(cmsgpack.unpack(ARGV[#ARGV])) do
    passed[name] = true
  end
end
-- Jobs that run for each tenant, known only where they are limited; whether a limit on them made us leave work.
local running, held_back = {}, false

local function may_run(name)
  if passed[name] then
    return false
  end
  if tenant_run_most == 0 then
    return true
  end
  running[name] = running[name] or tonumber(call('HGET', Q .. 'tr', name) or 0)
  local free = running[name] < tenant_run_most
  held_back = held_back or not free
  return free
end

local function add_tenants(level, rows)
  for j = 1, #rows, 2 do
    local name, start = rows[j], tonumber(rows[j + 1])
    if may_run(name) then
      level.tenants[#level.tenants + 1] = { name = name, start = start }
      virtual[name] = start
    end
  end
end

-- Tenants that may run nothing more are passed over, however many they are.
local function open_level(i, priority)
  local level = { index = i, priority = priority, tenants = {} }
  local first, rows = 0, nil
  repeat
    rows = call('ZRANGE', ready_key(priority), first, first + TENANTS - 1, 'WITHSCORES')
    add_tenants(level, rows)
    first = first + TENANTS
  until #rows < 2 * TENANTS or #level.tenants >= TENANTS
  level.spent = #level.tenants == 0
  levels[i] = level
end

-- The tenant's oldest lane, or, once the claim has a batch key, its lane of that key.
local function lane_of(level, tenant)
  local lane = tenant.lane
  if not lane or (batch and lane.batch ~= batch) then
    local key = batch or call('ZRANGE', lanes_key(level.priority, tenant.name), 0, 0)[1]
    local ids = call('ZRANGE', lane_key(level.priority, tenant.name, key), 0, limit - 1)
    lane = { batch = key, ids = ids, next = 1, taken = {} }
    tenant.lane = lane
  end
  return lane
end

local function next_id(level, tenant)
  local lane = lane_of(level, tenant)
  while true do
    local id = lane.ids[lane.next]
    local deadline = overdue and id and call('ZSCORE', Q .. 'dl', id)
    if not deadline or tonumber(deadline) > NOW then
      return id
    end
    lane.next = lane.next + 1
  end
end

-- By virtual time, then by name, so that the order does not depend on how many are claimed at once.
local function before(tenant, other)
  local mine, theirs = virtual[tenant.name], virtual[other.name]
  return mine < theirs or (mine == theirs and tenant.name < other.name)
end

-- Tenants come sorted by where they started, and only ever move up.
local function least_served(level)
  while true do
    local best
    for _, tenant in ipairs(level.tenants) do
      if best and virtual[best.name] < tenant.start then
        break
      end
      if not tenant.spent and (not best or before(tenant, best)) and may_run(tenant.name) then
        best = tenant
      end
    end
    local id = best and next_id(level, best)
    if id or not best then
      return best, id
    end
    best.spent = true
  end
end

local function full(level)
  if not apart then
    return false
  elseif level.index == 3 then
    return lowest_taken >= lowest_most
  end
  return #claimed - lowest_taken >= others_most
end

local function next_level()
  local chosen
  for i, level in ipairs(levels) do
    local aged = chosen and passes[i] >= AGEING and passes[i] > passes[chosen.index]
    if not level.spent and not full(level) and (not chosen or aged) then
      chosen = level
    end
  end
  return chosen
end

local function pass_over(chosen)
  for i = 2, #levels do
    if i == chosen.index then
      passes[i] = 0
    elseif not levels[i].spent then
      passes[i] = passes[i] + 1
    end
  end
end

local function pick()
  local level = next_level()
  while level do
    local tenant, id = least_served(level)
    if id then
      pass_over(level)
      lowest_taken = lowest_taken + (level.index == 3 and 1 or 0)
      return tenant, id
    end
    level.spent = true
    level = next_level()
  end
end

local function set_deadline(job)
  local limit_at = job.run and NOW + job.run or math.huge
  local deadline = math.min(limit_at, tonumber(job.finish_by or math.huge))
  if deadline < math.huge then
    deadlines[#deadlines + 1] = deadline
    deadlines[#deadlines + 1] = job.id
  elseif timed then
    endless[#endless + 1] = job.id
  end
end

local function serve(tenant, job)
  local name = tenant.name
  weights[name] = weights[name] or weight_of(name)
  floor = math.max(floor, virtual[name])
  virtual[name] = virtual[name] + job.cost / weights[name]
  job.weight = weights[name]
  batch = tenant.lane.batch
  tenant.lane.next = tenant.lane.next + 1
  table.insert(tenant.lane.taken, job.id)
  if tenant_run_most > 0 then
    running[name] = running[name] + 1
  end
end

local function take(tenant, id)
  local job = read(id)
  fence = fence + 1
  job.fence, job.attempt, job.began = fence, job.attempt + 1, NOW
  call('HSET', job.record, 'state', 'running', 'fence', fence, 'attempt', job.attempt, 'worker', worker, 'began', NOW)
  serve(tenant, job)
  set_deadline(job)
  leases[#leases + 1] = lease
  leases[#leases + 1] = id
  claimed[#claimed + 1] = job
end

local function leave_lanes()
  for _, level in ipairs(levels) do
    for _, tenant in ipairs(level.tenants) do
      local taken = tenant.lane and tenant.lane.taken or {}
      if #taken > 0 then
        remove(lane_key(level.priority, tenant.name, batch), taken)
        remove(Q .. 'q', taken)
        settle_lane(level.priority, tenant.name, batch)
        count_waiting(tenant.name, -#taken)
        count_running(tenant.name, #taken)
      end
    end
  end
  for name in pairs(weights) do
    set_virtual_time(name, virtual[name])
  end
end

local function commit()
  leave_lanes()
  call('ZADD', Q .. 'lease', unpack(leases))
  if #deadlines > 0 then
    call('ZADD', Q .. 'dl', unpack(deadlines))
  end
  if #endless > 0 then
    remove(Q .. 'dl', endless)
  end
  call('HSET', META, 'fence', fence, 'vtime', floor, 'passes:1', passes[2], 'passes:2', passes[3],
    'active', NOW)
end

-- Whoever heard the same bell but came too late to it, or waits beside us, finds the rest.
local function remember()
  local ids = {}
  for i, job in ipairs(claimed) do
    ids[i] = job.id
  end
  remember_claim(origin, number, lease_ms, claimed[1].fence, table.concat(ids, ' '))
  if #claimed == limit and queued > limit then
    ring()
  end
end

local function withdraw()
  call('ZREM', STANDING, standing_entry(origin, number, others_most, lease_ms, worker),
    standing_entry(origin, unheard, unheard_room, lease_ms, worker))
end

local function stand()
  call('ZADD', STANDING, NOW + stand_ms, standing_entry(origin, number, others_most, lease_ms, worker))
  call('PEXPIRE', STANDING, stand_ms)
  call('HSET', META, 'standing', 1)
end

if meta[7] then
  withdraw()
end
local last_number, first, ids = string.match(call('GET', claim_of(origin)) or '', '^(%d+) (%d+) (.*)$')
if last_number == number then
  return repeat_answer(first, ids)
elseif last_number == unheard then
  local rows = repeat_answer(first, ids)
  if rows[1] then
    return rows
  end
end
timed = call('EXISTS', Q .. 'dl') == 1
overdue = timed and expire_due(DUTIES) == DUTIES
promote_due(DUTIES)
queued = call('ZCARD', Q .. 'q')
if queued > 0 then
  for i, priority in ipairs(PRIORITIES) do
    open_level(i, priority)
  end
end
if run_most > 0 then
  local room = math.max(run_most - call('ZCARD', Q .. 'lease'), 0)
  held_back, limit = held_back or room <= limit, math.min(room, limit)
end
while #claimed < limit do
  local tenant, id = pick()
  if not id then
    break
  end
  take(tenant, id)
end
if held_back then
  call('HSET', META, 'held_back', 1)
end
flush()
if #claimed == 0 then
  if stand_ms > 0 and others_most > 0 then
    stand()
  end
  return {}
end
commit()
remember()
return answer(claimed)
