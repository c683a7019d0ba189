-- uses: no-writes | common rates
-- Answers queued, running, delayed, age of the oldest queued job, drained and arrived per second, ms since activity.
local function oldest_age()
  local head = call('ZRANGE', Q .. 'q', 0, 0)[1]
  return head and math.max(NOW - call('HGET', record(head), 'enqueued'), 0) or 0
end

return {
  call('ZCARD', Q .. 'q'),
  call('ZCARD', Q .. 'lease'),
  call('ZCARD', Q .. 'delay'),
  oldest_age(),
  tostring(per_second('drained')),
  tostring(per_second('arrived')),
  math.max(NOW - (call('HGET', META, 'active') or 0), 0),
}
