-- Limits per minute, as token buckets that hold a minute's worth and fill steadily. A bucket is one number, the time at
-- which it will be full again (the "theoretical arrival time" of the generic cell rate algorithm, ITU-T I.371), with the
-- limit it was made for: when that was raised, what is missing comes back sooner. A full one has no key. What costs more than a whole bucket needs a full one and leaves it in debt.
local MINUTE = 60000

local function until_full(key, most)
  local at, size = string.match(call('GET', key) or '', '^(%S+) (%S+)$')
  return at and math.max(tonumber(at) - NOW, 0) * math.min(tonumber(size) / most, 1) or 0
end

-- Takes from all of them, or, when one has too little, from none and answers which, with the wait in milliseconds.
local function pace(tenant, cost)
  local requests, costs = 'requests_per_minute', 'cost_per_minute'
  local names = { requests, requests .. '_per_tenant', costs, costs .. '_per_tenant' }
  local limits = call('HMGET', META, unpack(names))
  local amounts = { 1, 1, cost, cost }
  local keys = { Q .. 'b:r', Q .. 'b:r:' .. tenant, Q .. 'b:c', Q .. 'b:c:' .. tenant }
  local full_at = {}
  for i, key in ipairs(keys) do
    local most = tonumber(limits[i] or 0)
    if most > 0 then
      local filling, taken = until_full(key, most), amounts[i] * MINUTE / most
      local wait = filling + math.min(taken, MINUTE) - MINUTE
      if wait > 0 then
        return { 'rate', names[i], tostring(most), math.ceil(wait) }
      end
      full_at[key] = { NOW + filling + taken, most }
    end
  end
  for key, bucket in pairs(full_at) do
    if bucket[1] > NOW then
      call('SET', key, string.format('%.3f %.17g', unpack(bucket)), 'PXAT', integer(math.ceil(bucket[1])))
    end
  end
end
