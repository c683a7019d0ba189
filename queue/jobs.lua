-- Reading a job's record, and telling whether a fence still holds it.
local FIELDS = {
  'state', 'fence', 'tenant', 'priority', 'batch', 'cost', 'attempt', 'max', 'place', 'keep', 'stream', 'gates', 'idem',
  'began', 'held', 'last', 'finish_by', 'worker', 'handed',
}

local function read(id)
  local row = call('HMGET', record(id), unpack(FIELDS))
  if not row[1] then
    return nil
  end
  local job = { id = id }
  for i, field in ipairs(FIELDS) do
    job[field] = row[i]
  end
  job.batch = job.batch or ''
  job.gates = job.gates or ''
  job.attempt = tonumber(job.attempt or 0)
  return job
end

local function holds(job, fence)
  return job and job.state == 'running' and job.fence == fence
end

-- What an earlier call with this fence answered: settling twice is settling once.
local function answer_given(id, fence)
  return call('HGET', record(id), 'settled:' .. fence) or 'stale'
end
