-- Reading a job's record, and telling whether a fence still holds it.
local function read(id)
  local row = call('HGETALL', record(id))
  if not row[1] then
    return nil
  end
  local job = { id = id, batch = '', gates = '', attempt = 0 }
  for i = 1, #row, 2 do
    job[row[i]] = row[i + 1]
  end
  job.attempt = tonumber(job.attempt)
  return job
end

local function holds(job, fence)
  return job and job.state == 'running' and job.fence == fence
end

-- What an earlier call with this fence answered: settling twice is settling once.
local function answer_given(id, fence)
  return call('HGET', record(id), 'settled:' .. fence) or 'stale'
end
