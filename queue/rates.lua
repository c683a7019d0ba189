-- A moving average of events per second: an exponentially decayed count, divided by the weight its window has gathered
-- so far (the bias correction of Adam, D. Kingma and J. Ba, arXiv 1412.6980), so that it is right from the first second.
local WINDOW = 20000

local function decay(age)
  return math.exp(-math.max(age, 0) / WINDOW)
end

local function rate_fields(name)
  return name, name .. ':at', name .. ':since'
end

local function read_rate(name)
  return unpack(call('HMGET', META, rate_fields(name)))
end

-- `count` more events to the stored rate; also marks the function as active now. `...`: more fields of its record.
local function add_to_rate(name, count, sum, at, since, ...)
  local decayed = sum and sum * decay(NOW - at) or 0
  if decayed < 0.01 then
    since = NOW
  end
  call('HSET', META, name, decayed + count, name .. ':at', NOW, name .. ':since', since, 'active', NOW, ...)
end

local function observe(name, count)
  add_to_rate(name, count, read_rate(name))
end

-- Now, or as it was when the last event came.
local function per_second(as_of_last, sum, at, since)
  sum, at, since = tonumber(sum or 0), tonumber(at or NOW), tonumber(since or NOW)
  local moment = as_of_last and at or NOW
  local gathered = 1 - decay(math.max(moment - since, 1000))
  return sum * decay(moment - at) / (WINDOW / 1000 * gathered)
end
