-- uses: allow-oom | common jobs chunks outbox lanes leaving finish requeue
-- ARGV: the most jobs per duty. Answers how many were touched.
local MOST = tonumber(ARGV[1])

local function reap()
  local late = call('ZRANGEBYSCORE', Q .. 'lease', '-inf', NOW, 'LIMIT', 0, MOST)
  for _, id in ipairs(late) do
    local job = read(id)
    if job.attempt >= tonumber(job.max) then
      drop(job, 'dead', 'lost its worker ' .. job.worker .. ' in attempt ' .. job.attempt .. ' of ' .. job.max)
    else
      requeue(job, job.attempt, 0, 'lost')
    end
  end
  return #late
end

-- Forgets tenants that have nothing waiting and would start at the floor anyway.
local function sweep_tenants()
  local page = call('HSCAN', Q .. 'v', call('HGET', META, 'sweep') or '0', 'COUNT', MOST)
  local floor = virtual_floor()
  for i = 1, #page[2], 2 do
    local tenant = page[2][i]
    if tonumber(page[2][i + 1]) <= floor and call('HEXISTS', Q .. 'tq', tenant) == 0 then
      call('HDEL', Q .. 'v', tenant)
    end
  end
  if page[1] == '0' then
    call('HDEL', META, 'sweep')
  else
    call('HSET', META, 'sweep', page[1])
  end
end

local touched = expire_due(MOST) + reap() + promote_due(MOST)
sweep_tenants()
flush()
return touched
