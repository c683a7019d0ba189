-- uses: | common
-- ARGV: delivery. Makes it due now, with all of its tries. Answers 0 for an unknown one.
local key = Q .. 'w:' .. ARGV[1]
if call('EXISTS', key) == 0 then
  return 0
end
call('HSET', key, 'status', 'pending', 'tries', 0)
call('ZADD', Q .. 'wd', NOW, ARGV[1])
if call('PTTL', Q .. 'wd') < call('PTTL', key) then
  call('PEXPIRE', Q .. 'wd', call('PTTL', key))
end
call('PUBLISH', 'stoker:hooks', Q)
return 1
