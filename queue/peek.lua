-- uses: no-writes | common
-- ARGV: most entries per job, then id, stream id for each watched job.
-- Answers for each: nothing, or {state, attempt, fence of the last ended attempt, reason, outcome, entries, whether
-- those are all}. One answer has little more than MOST_BYTES of them, and one page at least.
local INLINE_LIMIT = 65536
local MOST_BYTES, PAGE = 1048576, 32
local LIVE = { queued = true, retrying = true, running = true }

local function outcome_of(id, state)
  local key = Q .. 'o:' .. id
  if LIVE[state] or call('STRLEN', key) > INLINE_LIMIT then
    return false
  end
  return call('GET', key) or ''
end

local bytes = 0
local function entries_of(id, after)
  local found, from, page = {}, '(' .. after, nil
  while #found < tonumber(ARGV[1]) and (bytes < MOST_BYTES) do
    page = call('XRANGE', Q .. 's:' .. id, from, '+', 'COUNT', math.min(PAGE, ARGV[1] - #found))
    for _, entry in ipairs(page) do
      found[#found + 1] = entry
      bytes = bytes + #entry[2][#entry[2]]
    end
    if #page < PAGE then
      break
    end
    from = '(' .. page[#page][1]
  end
  return found, page and #page < PAGE and #found < tonumber(ARGV[1])
end

local function peek(id, after)
  local row = call('HMGET', record(id), 'state', 'attempt', 'past', 'reason', 'stream')
  if not row[1] then
    return false
  end
  local entries, whole = {}, true
  if row[5] then
    entries, whole = entries_of(id, after)
  end
  return { row[1], row[2] or '0', row[3] or '0', row[4] or '', outcome_of(id, row[1]), entries, whole and 1 or 0 }
end

local rows = {}
for i = 2, #ARGV, 2 do
  rows[#rows + 1] = peek(ARGV[i], ARGV[i + 1])
end
return rows
