-- The end of a job: state, outcome, usage record and terminal event in one step, and a TTL on all that is kept.
local USAGE_RECORDS, usage_bounded = 100000, false
local INLINE_LIMIT = 65536
local DEAD_LETTERS = 10000
local DELIVERY_KEPT_MS = 7 * 24 * 3600 * 1000

local function pack_outcome(result, failure, usage, notes)
  return cmsgpack.pack({ result or false, failure or false, usage or false, notes or false })
end

local function held_ms(job)
  local since = job.state == 'running' and NOW - job.began or 0
  return tonumber(job.held or 0) + math.max(since, 0)
end

-- Named in the list of dead letters as long as the record lasts; what has expired leaves as new ones come.
local function list_dead(job)
  local list = Q .. 'dead'
  for _, id in ipairs(call('ZRANGE', list, 0, 1)) do
    if call('EXISTS', record(id)) == 0 then
      call('ZREM', list, id)
    end
  end
  call('ZADD', list, 0, job.id)
  call('ZREMRANGEBYRANK', list, 0, -DEAD_LETTERS - 1)
  if call('PTTL', list) < tonumber(job.keep) then
    call('PEXPIRE', list, job.keep)
  end
end

local function keep_for(job, state)
  local keep = job.keep
  call('PEXPIRE', job.record, keep)
  if job.stream then
    call('PEXPIRE', Q .. 's:' .. job.id, keep)
  end
  if job.idem then
    call('PEXPIRE', Q .. 'i:' .. job.idem, keep)
  end
  if state == 'dead' then
    list_dead(job)
  end
  if state == 'dead' or state == 'failed' then
    call('PEXPIRE', Q .. 'p:' .. job.id, keep)
  else
    unneeded[#unneeded + 1] = Q .. 'p:' .. job.id
  end
end

-- Somebody has to be told of this end: each of a job's lives has its own delivery.
local function announce(job, state)
  local delivery = job.id .. '.' .. (job.replays or 0)
  call('HSET', Q .. 'w:' .. delivery, 'url', job.hook, 'tenant', job.tenant, 'state', state, 'ended', NOW,
    'status', 'pending', 'tries', 0)
  call('PEXPIRE', Q .. 'w:' .. delivery, DELIVERY_KEPT_MS)
  call('ZADD', Q .. 'wd', NOW, delivery)
  call('PEXPIRE', Q .. 'wd', DELIVERY_KEPT_MS)
  call('PUBLISH', 'stoker:hooks', Q)
end

local function record_usage(job, state, usage)
  call('XADD', Q .. 'use', '*', 'job', job.id, 'tenant', job.tenant, 'state', state, 'attempt', job.attempt,
    'held_ms', held_ms(job), 'usage', usage or '')
  if not usage_bounded then
    usage_bounded = true
    call('XTRIM', Q .. 'use', 'MAXLEN', '~', USAGE_RECORDS)
  end
end

-- `outcome` is packed, or nil: then an earlier attempt's stays. `usage` goes to the usage record as it is.
local function finish(job, state, reason, outcome, usage)
  local id = job.id
  call('HSET', job.record, 'state', state, 'ended', NOW)
  if reason ~= '' then
    call('HSET', job.record, 'reason', reason)
  end
  if outcome then
    call('SET', Q .. 'o:' .. id, outcome, 'PX', job.keep)
  else
    call('PEXPIRE', Q .. 'o:' .. id, job.keep)
  end
  keep_for(job, state)
  record_usage(job, state, usage)
  if job.hook then
    announce(job, state)
  end
  if job.gates ~= '' then
    outcome = outcome or call('GET', Q .. 'o:' .. id) or ''
    local inline = #outcome <= INLINE_LIMIT and outcome
    post(job.gates, { 'end', id, job.stream and last_entry(id) or '0', job.attempt, state, reason, inline })
  end
end

-- Ends a job that no worker settled, wherever it is, and tells the worker that has it.
local function drop(job, state, reason)
  if job.state == 'running' then
    release({ job })
    call('PUBLISH', 'stoker:worker:' .. job.worker, job.id .. ' ' .. state)
  else
    stop_waiting(job)
  end
  finish(job, state, reason)
end

local function beyond(what, milliseconds)
  return string.format('%s its limit of %.15g s', what, milliseconds / 1000)
end

-- What its code led to, another job of the function, may have needed the place that it held.
local function waited_for_itself(job)
  local other = job.led and call('HGET', record(job.led), 'state')
  if other ~= 'queued' and other ~= 'retrying' then
    return ''
  end
  return '; its code led to job ' .. job.led .. ' of the same function, which waits for a free place: if it waited for '
    .. 'that, it waited for itself; a higher max_replicas or concurrency leaves room for such calls'
end

-- `due`: the deadline that is over.
local function expire(job, due)
  local running = job.state == 'running'
  local why
  if job.finish_by and tonumber(job.finish_by) <= NOW then
    why = beyond('not finished within', job.finish_by - job.enqueued)
  elseif running then
    why = beyond('ran longer than', job.run or due - job.began)
  else
    why = beyond('not started within', due - job.enqueued)
  end
  drop(job, running and 'timed_out' or 'expired', why .. (running and waited_for_itself(job) or ''))
end

local function expire_due(most)
  local due = call('ZRANGEBYSCORE', Q .. 'dl', '-inf', NOW, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #due, 2 do
    expire(read(due[i]), tonumber(due[i + 1]))
  end
  return #due / 2
end
