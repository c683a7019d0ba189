-- Reading a job's record, and telling whether a fence still holds it. What isn't in a record is as usual; `store` in
-- enqueue.lua leaves it out, `job` in replies.py knows it too.
local function read(id)
  local key = record(id)
  local row = call('HGETALL', key)
  if not row[1] then
    return nil
  end
  local job = { id = id, record = key }
  for i = 1, #row, 2 do
    job[row[i]] = row[i + 1]
  end
  job.attempt = tonumber(job.attempt or 0)
  job.batch, job.gates, job.priority = job.batch or '', job.gates or '', job.priority or '1'
  job.cost, job.max, job.keep = job.cost or '1.0', job.max or '3', job.keep or '3600000'
  return job
end

local function holds(job, fence)
  return job and job.state == 'running' and job.fence == fence
end

-- What an earlier call with this fence answered: settling twice is settling once. A success says so itself.
local function answer_given(job, fence)
  if job and job.state == 'succeeded' and job.fence == fence then
    return 'done'
  end
  return job and job['settled:' .. fence] or 'stale'
end
