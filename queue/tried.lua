-- uses: allow-oom | common
-- ARGV: delivery, end of its lease, what there is to log ('' = nothing), status, ms until the next try ('' = none), body
-- to keep for it ('' = none). Answers 1, or 0 when the lease is another's by now: then this was only logged.
local MOST_LOGGED = 50
local delivery, lease, entry, status, pause, body = unpack(ARGV)
local key, tries = Q .. 'w:' .. delivery, Q .. 'wl:' .. delivery

if call('EXISTS', key) == 0 then
  return 0
end
if entry ~= '' and call('LINDEX', tries, -1) ~= entry then
  call('RPUSH', tries, entry)
  call('LTRIM', tries, -MOST_LOGGED, -1)
  call('PEXPIRE', tries, call('PTTL', key))
end
if call('ZSCORE', Q .. 'wd', delivery) ~= lease then
  return 0
end
if entry ~= '' then
  call('HINCRBY', key, 'tries', 1)
end
call('HSET', key, 'status', status)
if body ~= '' then
  call('HSET', key, 'body', body)
elseif status == 'delivered' then
  call('HDEL', key, 'body')
end
if pause == '' then
  call('ZREM', Q .. 'wd', delivery)
else
  call('ZADD', Q .. 'wd', NOW + pause, delivery)
end
return 1
