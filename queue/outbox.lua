-- Events for gateways: collected while the script runs, one message per gateway at its end.
local outbox = {}

local function post_to(gate, frame)
  local frames = outbox[gate]
  if not frames then
    frames = {}
    outbox[gate] = frames
  end
  frames[#frames + 1] = frame
end

local function post(gates, frame)
  if not string.find(gates, ',', 1, true) then
    return gates ~= '' and post_to(gates, frame)
  end
  for gate in string.gmatch(gates, '[^,]+') do
    post_to(gate, frame)
  end
end

local function flush()
  for gate, frames in pairs(outbox) do
    call('PUBLISH', 'stoker:gateway:' .. gate, cmsgpack.pack(frames))
  end
end
