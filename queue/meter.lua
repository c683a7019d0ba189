-- uses: allow-oom | common
-- ARGV: id, fence, usage for each attempt that was stopped from outside. What it had used until then goes on record
-- once, behind the job's own usage record, and into its outcome. Answers how many were recorded.
local USAGE_RECORDS = 100000
local STOPPED = { cancelled = true, timed_out = true }
local recorded = 0

local function add_to_outcome(id, usage)
  local key = Q .. 'o:' .. id
  local packed = call('GET', key)
  local outcome = packed and cmsgpack.unpack(packed) or { false, false, false, false }
  outcome[3] = usage
  call('SET', key, cmsgpack.pack(outcome), 'PX', call('PTTL', record(id)))
end

for i = 1, #ARGV, 3 do
  local id, fence, usage = unpack(ARGV, i, i + 2)
  local row = call('HMGET', record(id), 'state', 'fence', 'tenant', 'attempt')
  if STOPPED[row[1]] and row[2] == fence and call('HSETNX', record(id), 'metered', 1) == 1 then
    call('XADD', Q .. 'use', 'MAXLEN', '~', USAGE_RECORDS, '*', 'job', id, 'tenant', row[3], 'state', row[1],
      'attempt', row[4], 'held_ms', 0, 'usage', usage, 'late', 1)
    add_to_outcome(id, usage)
    recorded = recorded + 1
  end
end
return recorded
