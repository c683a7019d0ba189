-- Lanes: one per priority, tenant and batch key, in order of arrival. Start-time fair queueing over tenants
-- (P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996): a tenant's virtual time grows by
-- cost / weight with each claim; a tenant that comes back starts at the virtual time last served, so that idling
-- earns nothing.
local PRIORITIES = { '0', '1', '2' }

local function lane_key(priority, tenant, batch)
  return Q .. 'l:' .. priority .. ':' .. #tenant .. ':' .. tenant .. ':' .. batch
end

local function lanes_key(priority, tenant)
  return Q .. 'tl:' .. priority .. ':' .. tenant
end

local function ready_key(priority)
  return Q .. 'r:' .. priority
end

local function virtual_floor()
  return tonumber(call('HGET', META, 'vtime') or 0)
end

local function virtual_time(tenant)
  for _, priority in ipairs(PRIORITIES) do
    local value = call('ZSCORE', ready_key(priority), tenant)
    if value then
      return tonumber(value)
    end
  end
  local value = math.max(tonumber(call('HGET', Q .. 'v', tenant) or 0), virtual_floor())
  call('HSET', Q .. 'v', tenant, value)
  return value
end

local function weight_of(tenant)
  return tonumber(call('HGET', Q .. 'w', tenant) or 1)
end

local function set_weight(tenant, weight)
  if weight == weight_of(tenant) then
    return
  end
  if weight == 1 then
    call('HDEL', Q .. 'w', tenant)
  else
    call('HSET', Q .. 'w', tenant, weight)
  end
end

-- Jobs that wait, in a lane or for their due time.
local function count_waiting(tenant, change)
  if call('HINCRBY', Q .. 'tq', tenant, change) <= 0 then
    call('HDEL', Q .. 'tq', tenant)
  end
end

local function count_running(tenant, change)
  if call('HINCRBY', Q .. 'tr', tenant, change) <= 0 then
    call('HDEL', Q .. 'tr', tenant)
  end
end

local function ring()
  call('PUBLISH', 'stoker:bell:' .. string.match(META, '{(.*)}:m$'), '')
end

local function list_lane(priority, tenant, batch, place)
  call('ZADD', lanes_key(priority, tenant), place, batch)
  call('ZADD', ready_key(priority), virtual_time(tenant), tenant)
end

-- Puts a job at its place in its lane; workers are told when it is the only queued one, or the first of a lane that
-- goes before work they may have left.
local function push(job)
  local lane = lane_key(job.priority, job.tenant, job.batch)
  call('ZADD', lane, job.place, job.id)
  call('ZADD', Q .. 'q', job.place, job.id)
  local first = call('ZRANK', lane, job.id) == 0
  if first then
    list_lane(job.priority, job.tenant, job.batch, job.place)
  end
  if call('ZCARD', Q .. 'q') == 1 or (first and tonumber(job.priority) < 2) then
    ring()
  end
end
