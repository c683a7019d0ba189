-- What leaves at a script's end: events for gateways, one message for each, and keys that nobody needs any more.
local outbox, unneeded = {}, {}

local function post_to(gate, frame)
  local frames = outbox[gate]
  if frames then
    frames[#frames + 1] = frame
  else
    outbox[gate] = { frame }
  end
end

local function post(gates, frame)
  local frames = outbox[gates]
  if frames then
    frames[#frames + 1] = frame
    return
  end
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
  for i = 1, #unneeded, AT_ONCE do
    call('DEL', unpack(unneeded, i, math.min(i + AT_ONCE - 1, #unneeded)))
  end
end
