-- Back into the queue after an attempt, behind a mark in the stream that says where the attempt ended.
local function mark_boundary(job)
  local entry = ''
  if job.stream then
    entry = call('XADD', Q .. 's:' .. job.id, 'NOMKSTREAM', '*', 'f', job.fence, 'a', job.attempt) or ''
  end
  post(job.gates, { 'retry', job.id, entry, job.last or '0', job.fence, job.attempt })
  return entry
end

-- With its old place in the sequence, so it comes back at the head of its lane (or behind who was there before it).
local function requeue(job, attempt, delay)
  local entry = mark_boundary(job)
  call('HSET', record(job.id), 'state', 'retrying', 'attempt', attempt, 'held', integer(held_ms(job)),
    'past', job.fence, 'worker', '')
  call('HDEL', record(job.id), 'seq', 'charged')
  if entry ~= '' then
    call('HSET', record(job.id), 'last', entry)
  end
  release(job)
  if job.finish_by then
    call('ZADD', Q .. 'dl', job.finish_by, job.id)
  else
    call('ZREM', Q .. 'dl', job.id)
  end
  count_waiting(job.tenant, 1)
  if delay > 0 then
    call('ZADD', Q .. 'delay', NOW + delay, job.id)
  else
    push(job)
  end
end
