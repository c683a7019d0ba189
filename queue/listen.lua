-- uses: | common
-- ARGV: id, gateway. Adds a receiver of a live job's events; the oldest goes when there are too many.
-- The receiver is told to read what it missed. Answers 0 for a job that has ended or is unknown.
local MOST_GATEWAYS = 8
local LIVE = { queued = true, retrying = true, running = true }
local id, gateway = ARGV[1], ARGV[2]

local function joined(gates)
  local all = {}
  for gate in string.gmatch(gates, '[^,]+') do
    if gate ~= gateway then
      all[#all + 1] = gate
    end
  end
  if #all >= MOST_GATEWAYS then
    table.remove(all, 1)
  end
  all[#all + 1] = gateway
  return table.concat(all, ',')
end

local row = call('HMGET', record(id), 'state', 'gates')
local live = LIVE[row[1]]
if live then
  call('HSET', record(id), 'gates', joined(row[2] or ''))
end
call('PUBLISH', 'stoker:gateway:' .. gateway, cmsgpack.pack({ { 'read', id } }))
return live and 1 or 0
