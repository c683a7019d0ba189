-- uses: no-writes | common rates
-- Answers queued, running, delayed, age of the oldest queued job, drained and arrived per second, ms since activity,
-- drained per second when a job ended last, ms of the last cold start ('' = never measured). What a worker keeps without
-- running it is queued.
local function oldest_age()
  local head = call('ZRANGE', Q .. 'q', 0, 0)[1]
  return head and math.max(NOW - call('HGET', record(head), 'enqueued'), 0) or 0
end

local meta = call('HMGET', META, 'active', 'cold_start', 'drained', 'drained:at', 'drained:since', rate_fields('arrived'))
local kept = call('ZCARD', Q .. 'aside')
return {
  call('ZCARD', Q .. 'q') + kept,
  call('ZCARD', Q .. 'lease') - kept,
  call('ZCARD', Q .. 'delay'),
  oldest_age(),
  tostring(per_second(false, meta[3], meta[4], meta[5])),
  tostring(per_second(false, meta[6], meta[7], meta[8])),
  math.max(NOW - (meta[1] or 0), 0),
  tostring(per_second(true, meta[3], meta[4], meta[5])),
  meta[2] or '',
}
