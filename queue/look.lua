-- uses: no-writes | common lanes
-- ARGV: id. Answers {fields, outcome, jobs ahead} or nothing.
local id = ARGV[1]
local job = record(id)
local fields = call('HGETALL', job)
if #fields == 0 then
  return false
end

-- Tenants take turns: for each place in the own lane one job of each other tenant, but never more than all before it.
local function ahead()
  local total = call('ZRANK', Q .. 'q', id)
  if not total then
    return false
  end
  local row = call('HMGET', job, 'priority', 'tenant', 'batch')
  local priority = row[1] or '1'
  local rank = call('ZRANK', lane_key(priority, row[2], row[3] or ''), id)
  local tenants = call('ZCARD', ready_key(priority))
  return math.min(total, (rank + 1) * tenants - 1)
end

return { fields, call('GET', Q .. 'o:' .. id), ahead() }
