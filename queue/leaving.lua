-- What moves a tenant on: being charged for what it got, and jobs that leave their lane.
local function set_virtual_time(tenant, value)
  call('HSET', Q .. 'v', tenant, value)
  for _, priority in ipairs(PRIORITIES) do
    call('ZADD', ready_key(priority), 'XX', value, tenant)
  end
end

-- Corrects what a tenant was charged; a tenant forgotten since then stands at the floor.
local function charge(tenant, cost)
  if cost ~= 0 then
    local value = tonumber(call('HGET', Q .. 'v', tenant)) or virtual_floor()
    set_virtual_time(tenant, value + cost / weight_of(tenant))
  end
end

-- After jobs left a lane: its next head, or its end.
local function settle_lane(priority, tenant, batch)
  local lanes = lanes_key(priority, tenant)
  local head = call('ZRANGE', lane_key(priority, tenant, batch), 0, 0, 'WITHSCORES')
  if head[1] then
    call('ZADD', lanes, head[2], batch)
  else
    call('ZREM', lanes, batch)
    if call('EXISTS', lanes) == 0 then
      call('ZREM', ready_key(priority), tenant)
    end
  end
end

local function remove(key, members)
  for i = 1, #members, AT_ONCE do
    call('ZREM', key, unpack(members, i, math.min(i + AT_ONCE - 1, #members)))
  end
end

local function stop_waiting(job)
  count_waiting(job.tenant, -1)
  call('ZREM', Q .. 'dl', job.id)
  if call('ZREM', Q .. 'delay', job.id) == 0 then
    call('ZREM', Q .. 'q', job.id)
    call('ZREM', lane_key(job.priority, job.tenant, job.batch), job.id)
    settle_lane(job.priority, job.tenant, job.batch)
  end
end

-- Takes running jobs from their workers. When a claim had left work because of a limit on running jobs, workers hear it.
local function release(jobs)
  local ids, timed, kept, counts = {}, {}, {}, {}
  for i, job in ipairs(jobs) do
    ids[i] = job.id
    counts[job.tenant] = (counts[job.tenant] or 0) + 1
    if job.run or job.finish_by then
      timed[#timed + 1] = job.id
    end
    if job.aside == job.fence then
      kept[#kept + 1] = job.id
    end
  end
  remove(Q .. 'lease', ids)
  remove(Q .. 'dl', timed)
  remove(Q .. 'aside', kept)
  for tenant, count in pairs(counts) do
    count_running(tenant, -count)
  end
  if call('HDEL', META, 'held_back') == 1 then
    ring()
  end
end

local function promote_due(most)
  local due = call('ZRANGEBYSCORE', Q .. 'delay', '-inf', NOW, 'LIMIT', 0, most)
  for _, id in ipairs(due) do
    call('ZREM', Q .. 'delay', id)
    push(read(id))
  end
  return #due
end
