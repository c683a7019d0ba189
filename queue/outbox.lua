-- Events for gateways: collected while the script runs, one message per gateway at its end.
local outbox = {}

local function post(gates, frame)
  for gate in string.gmatch(gates, '[^,]+') do
    local frames = outbox[gate]
    if not frames then
      frames = {}
      outbox[gate] = frames
    end
    frames[#frames + 1] = frame
  end
end

local function flush()
  for gate, frames in pairs(outbox) do
    call('PUBLISH', 'stoker:gateway:' .. gate, cmsgpack.pack(frames))
  end
end
