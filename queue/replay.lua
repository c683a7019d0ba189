-- uses: | common jobs chunks outbox lanes
-- ARGV: id, request. Puts a dead or failed job back into the queue as if it came anew; a request does so once.
-- Answers {1, state} when it did (now or before), {0, state} when the job is in another state, or nothing for an
-- unknown job.
local id, request = ARGV[1], ARGV[2]

local function keep_forever(job)
  for _, kind in ipairs({ 'j:', 'p:', 's:' }) do
    call('PERSIST', Q .. kind .. id)
  end
  local idem = job.idem and Q .. 'i:' .. job.idem
  local used = idem and call('GET', idem)
  if used and string.sub(used, 1, #id + 1) == id .. ':' then
    call('PERSIST', idem)
  end
end

-- The time for the whole job counts from now on again.
local function renew_deadline(job)
  if job.finish_by then
    local finish_by = NOW + job.finish_by - job.enqueued
    call('HSET', record(id), 'finish_by', integer(finish_by))
    call('ZADD', Q .. 'dl', finish_by, id)
  end
end

local function replay(job)
  mark_boundary(job)
  job.place = call('HINCRBY', META, 'place', 1)
  if job.place == 1 then
    call('PERSIST', Q .. 'use')
  end
  keep_forever(job)
  call('HSET', record(id), 'state', 'queued', 'attempt', 0, 'held', 0, 'past', job.fence or 0, 'place', job.place,
    'enqueued', NOW, 'replay', request, 'worker', '', 'reason', '')
  call('HDEL', record(id), 'seq', 'charged', 'handed', 'log', 'ended', 'began', 'since', 'led', 'gates', 'wake')
  call('HINCRBY', record(id), 'replays', 1)
  call('DEL', Q .. 'o:' .. id)
  renew_deadline(job)
  call('ZREM', Q .. 'dead', id)
  count_waiting(job.tenant, 1)
  call('HSET', META, 'active', NOW)
  push(job)
end

local job = read(id)
if not job then
  return false
end
if job.replay == request then
  return { 1, job.state }
end
if job.state ~= 'dead' and job.state ~= 'failed' then
  return { 0, job.state }
end
replay(job)
return { 1, 'queued' }
