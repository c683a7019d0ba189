-- uses: allow-oom | common jobs chunks outbox lanes leaving finish
-- ARGV: the most jobs. Cancels live jobs; when none is left, forgets the function. Answers how many it cancelled.
local USAGE_KEPT_MS = 7 * 24 * 3600 * 1000
local cancelled = 0

for _, name in ipairs({ 'q', 'delay', 'lease' }) do
  local left = ARGV[1] - cancelled
  for _, id in ipairs(left > 0 and call('ZRANGE', Q .. name, 0, left - 1) or {}) do
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
