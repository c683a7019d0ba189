-- uses: | common
-- ARGV: id, gateway. Adds a receiver of a live job's events; the oldest goes when there are too many.
local MOST_GATEWAYS = 8
local LIVE = { queued = true, retrying = true, running = true }

local row = call('HMGET', record(ARGV[1]), 'state', 'gates')
if not LIVE[row[1]] then
  return 0
end
local gates = {}
for gate in string.gmatch(row[2] or '', '[^,]+') do
  if gate == ARGV[2] then
    return 1
  end
  gates[#gates + 1] = gate
end
gates[#gates + 1] = ARGV[2]
if #gates > MOST_GATEWAYS then
  table.remove(gates, 1)
end
call('HSET', record(ARGV[1]), 'gates', table.concat(gates, ','))
return 1
