-- KEYS[1] is stoker:q:{function}:m. Every other key differs from it only behind the hash tag, so all share its slot.
-- Time is the server's own: NOW in milliseconds, NOW_US in microseconds.
local call = redis.call
local META = KEYS[1]
local Q = string.sub(META, 1, -2)
local clock = call('TIME')
local NOW_US = clock[1] * 1000000 + clock[2]
local NOW = math.floor(NOW_US / 1000)
-- How many arguments Lua's stack surely holds.
local AT_ONCE = 4000

-- As readers are told: what its worker keeps without running it waits (see aside.lua; `job` in replies.py knows it too).
local function shown_state(state, aside, fence)
  return state == 'running' and aside and aside == fence and 'queued' or state
end

local function record(id)
  return Q .. 'j:' .. id
end

-- For replies and for parts of a text: what is stored as a number needs it not.
local function integer(number)
  return string.format('%.0f', number)
end
