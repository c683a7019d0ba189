-- uses: | common
-- ARGV: digest of an idempotency key, id. The key is free again, if it still leads to this job, which stays as it is.
local key = Q .. 'i:' .. ARGV[1]
local used = call('GET', key)
if used and string.match(used, '^[^:]*') == ARGV[2] then
  call('DEL', key)
end
