-- uses: allow-oom | common jobs chunks outbox lanes leaving finish
-- ARGV: worker, lease ms, then id, fence for each held job. Renews; answers id, reason for each lost one.
local lease = NOW + tonumber(ARGV[2])
local REASONS = { cancelled = 'cancelled', timed_out = 'timed_out' }
local lost = {}

expire_due(100)
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local row = call('HMGET', record(id), 'state', 'fence')
  if row[2] == ARGV[i + 1] and row[1] == 'running' then
    call('ZADD', Q .. 'lease', 'XX', lease, id)
  else
    lost[#lost + 1] = id
    lost[#lost + 1] = row[2] == ARGV[i + 1] and REASONS[row[1]] or 'lost'
  end
end
flush()
return lost
