-- uses: allow-oom | common jobs chunks outbox lanes leaving rates finish requeue
-- ARGV: backoff base and cap in ms, then id, fence, error, retry, counts, usage, notes, random [0, 1) for each.
-- Answers one word for each.
local BASE, CAP = tonumber(ARGV[1]), tonumber(ARGV[2])
-- A job that is handed back again and again takes its engine down with it: from then on its attempts count.
local MOST_HAND_BACKS = 10
local answers = {}
local ended = 0

local function hand_back(job, usage)
  charge(job.tenant, -tonumber(job.charged or job.cost))
  call('HINCRBY', record(job.id), 'handed', 1)
  requeue(job, job.attempt - 1, 0, 'handed_back', usage)
  return 'retrying'
end

local function end_job(job, state, reason, outcome, usage)
  release({ job })
  finish(job, state, reason, outcome, usage)
  ended = ended + 1
  return state == 'dead' and 'dead' or 'done'
end

local function retry(job, random, outcome, usage, failure)
  local ceiling = math.min(CAP, BASE * 2 ^ (job.attempt - 1))
  call('SET', Q .. 'o:' .. job.id, outcome)
  requeue(job, job.attempt, math.floor(random * ceiling), 'failed', usage, failure)
  return 'retrying'
end

local function settle(job, failure, again, counts, usage, notes, random)
  if counts == '0' and tonumber(job.handed or 0) < MOST_HAND_BACKS then
    return hand_back(job, usage)
  end
  local outcome = pack_outcome(false, failure, usage, notes)
  if again ~= '1' then
    return end_job(job, 'failed', '', outcome, usage)
  end
  if job.attempt >= tonumber(job.max) then
    return end_job(job, 'dead', 'failed in attempt ' .. job.attempt .. ' of ' .. job.max, outcome, usage)
  end
  return retry(job, tonumber(random), outcome, usage, failure)
end

local function fail(id, fence, ...)
  local job = read(id)
  if not holds(job, fence) then
    return answer_given(job, fence)
  end
  local answer = settle(job, ...)
  call('HSET', record(id), 'settled:' .. fence, answer)
  return answer
end

for i = 3, #ARGV, 8 do
  answers[#answers + 1] = fail(unpack(ARGV, i, i + 7))
end
if ended > 0 then
  observe('drained', ended)
end
flush()
return answers
