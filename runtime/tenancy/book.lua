-- Enters usage records of one function and one month's day into a tenant's books, each once.
-- KEYS: cursors, live, held, reserved, day, month. ARGV: function, TTL of the books in ms, id of the first record, of the
-- last, number of metrics, their names, their sums over all the records (the last is the cost in micro-USD), each job.
-- Answers the id of the record that was entered last. When it is one of these, other than the last, nothing was entered:
-- the sums have to be made of those behind it.
local call = redis.call
local CURSORS, LIVE, HELD, RESERVED, DAY, MONTH = unpack(KEYS)
local name, ttl, first, last, count = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local AT_ONCE = 1000

local function parts(id)
  local dash = string.find(id, '-', 1, true)
  return tonumber(string.sub(id, 1, dash - 1)), tonumber(string.sub(id, dash + 1))
end

local function behind(id, other)
  local ms, sequence = parts(id)
  local other_ms, other_sequence = parts(other)
  return ms > other_ms or (ms == other_ms and sequence > other_sequence)
end

local entered = call('HGET', CURSORS, name) or '0-0'
if not behind(first, entered) then
  return entered
end
for metric = 6, 5 + count do
  call('HINCRBY', DAY, name .. '|' .. ARGV[metric], ARGV[metric + count])
end
call('PEXPIRE', DAY, ttl)
call('INCRBY', MONTH, ARGV[5 + 2 * count])
call('PEXPIRE', MONTH, ttl)
for at = 6 + 2 * count, #ARGV, AT_ONCE do
  local till = math.min(at + AT_ONCE - 1, #ARGV)
  call('ZREM', LIVE, unpack(ARGV, at, till))
  call('ZREM', HELD, unpack(ARGV, at, till))
  call('HDEL', RESERVED, unpack(ARGV, at, till))
end
call('HSET', CURSORS, name, last)
call('PEXPIRE', CURSORS, ttl)
return last
