-- uses: | common
-- ARGV: the most, lease ms. Deliveries that are due, each leased to the caller: who doesn't say what became of one
-- within its lease loses it to the next caller. Answers {delivery, end of its lease, fields} for each.
local lease = NOW + tonumber(ARGV[2])
local rows = {}

for _, delivery in ipairs(call('ZRANGEBYSCORE', Q .. 'wd', '-inf', NOW, 'LIMIT', 0, ARGV[1])) do
  local fields = call('HGETALL', Q .. 'w:' .. delivery)
  if fields[1] then
    call('ZADD', Q .. 'wd', lease, delivery)
    rows[#rows + 1] = { delivery, integer(lease), fields }
  else
    call('ZREM', Q .. 'wd', delivery)
  end
end
return rows
