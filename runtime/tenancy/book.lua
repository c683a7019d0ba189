-- Enters usage records into one tenant's books, each once: records up to the function's last entered one are skipped.
-- KEYS: cursors, live, held, reserved. ARGV: function, TTL of the books in ms, number of metrics, their names; then for each
-- record: stream id, job, day key, month key, that many integers. The last metric is the cost in micro-USD.
local call = redis.call
local CURSORS, LIVE, HELD, RESERVED = unpack(KEYS)
local name, ttl, count = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function parts(id)
  local dash = string.find(id, '-', 1, true)
  return tonumber(string.sub(id, 1, dash - 1)), tonumber(string.sub(id, dash + 1))
end

local function behind(id, last)
  local ms, sequence = parts(id)
  local last_ms, last_sequence = parts(last)
  return ms > last_ms or (ms == last_ms and sequence > last_sequence)
end

local last, entered, at = call('HGET', CURSORS, name) or '0-0', 0, 4 + count
while at <= #ARGV do
  local id, job, day, month = unpack(ARGV, at, at + 3)
  if behind(id, last) then
    for metric = 1, count do
      call('HINCRBY', day, name .. '|' .. ARGV[3 + metric], ARGV[at + 3 + metric])
    end
    call('PEXPIRE', day, ttl)
    call('INCRBY', month, ARGV[at + 3 + count])
    call('PEXPIRE', month, ttl)
    call('ZREM', LIVE, job)
    call('ZREM', HELD, job)
    call('HDEL', RESERVED, job)
    last, entered = id, entered + 1
  end
  at = at + 4 + count
end
call('HSET', CURSORS, name, last)
call('PEXPIRE', CURSORS, ttl)
return entered
