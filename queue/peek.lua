-- uses: no-writes | common
-- ARGV: most entries per job, then id, stream id for each watched job.
-- Answers for each: nothing, or {state, attempt, fence of the last ended attempt, reason, outcome, entries}.
local INLINE_LIMIT = 65536
local LIVE = { queued = true, retrying = true, running = true }

local function outcome_of(id, state)
  local key = Q .. 'o:' .. id
  if LIVE[state] or call('STRLEN', key) > INLINE_LIMIT then
    return false
  end
  return call('GET', key) or ''
end

local function peek(id, after)
  local row = call('HMGET', record(id), 'state', 'attempt', 'past', 'reason', 'stream')
  if not row[1] then
    return false
  end
  local entries = row[5] and call('XRANGE', Q .. 's:' .. id, '(' .. after, '+', 'COUNT', ARGV[1]) or {}
  return { row[1], row[2] or '0', row[3] or '0', row[4] or '', outcome_of(id, row[1]), entries }
end

local rows = {}
for i = 2, #ARGV, 2 do
  rows[#rows + 1] = peek(ARGV[i], ARGV[i + 1])
end
return rows
