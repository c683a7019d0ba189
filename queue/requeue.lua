-- What became of an attempt that was not the job's last: one msgpack list behind the others in its record.
local ERROR_LOGGED = 1024
local function log_attempt(job, how, usage, failure)
  local kept = failure and #failure <= ERROR_LOGGED and failure
  local entry = cmsgpack.pack({ job.attempt, job.worker, tonumber(job.began), NOW, how, usage or '', kept or '' })
  call('HSET', record(job.id), 'log', (job.log or '') .. entry)
end

-- Back into the queue after an attempt, behind a mark in the stream that says where the attempt ended.
-- `...`: how the attempt ended, what it used, its error. With its old place in the sequence, so it comes back at the head
-- of its lane (or behind who was there before it). It waits since now, but since before if its worker only kept it.
local function requeue(job, attempt, delay, ...)
  log_attempt(job, ...)
  local entry, previous = mark_boundary(job)
  post(job.gates, { 'retry', job.id, entry, previous, job.fence, job.attempt })
  call('HSET', record(job.id), 'state', 'retrying', 'attempt', attempt, 'held', held_ms(job),
    'past', job.fence, 'worker', '')
  call('HDEL', record(job.id), 'seq', 'charged', 'began', 'led')
  if job.aside ~= job.fence then
    call('HSET', record(job.id), 'since', NOW)
  end
  release({ job })
  if job.finish_by then
    call('ZADD', Q .. 'dl', job.finish_by, job.id)
  end
  count_waiting(job.tenant, 1)
  if delay > 0 then
    call('ZADD', Q .. 'delay', NOW + delay, job.id)
  else
    push(job)
  end
end
