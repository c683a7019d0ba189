-- uses: allow-oom | common jobs outbox lanes leaving finish
-- ARGV: the most jobs. Cancels live jobs; when none is left, forgets the function. Answers how many it cancelled.
local USAGE_KEPT_MS = 7 * 24 * 3600 * 1000
local cancelled = 0

for _, name in ipairs({ 'q', 'delay', 'lease' }) do
  for _, id in ipairs(call('ZRANGE', Q .. name, 0, ARGV[1] - cancelled - 1)) do
    drop(read(id), 'cancelled', 'the function was deleted')
    cancelled = cancelled + 1
  end
end
if cancelled == 0 then
  call('DEL', META, Q .. 'v', Q .. 'w', Q .. 'st')
  call('PEXPIRE', Q .. 'use', USAGE_KEPT_MS)
end
flush()
return cancelled
