-- Claims that found no work and stand for a while: the next job goes straight to their worker, which spares it the bell
-- and a round trip. A message that is lost costs nothing but that: the next claim says which stand it heard nothing of,
-- and is answered with the job.
local STANDING = Q .. 'st'

local function claim_of(origin)
  return Q .. 'c:' .. origin
end

local function standing_entry(origin, number, lease, worker)
  return origin .. ' ' .. number .. ' ' .. lease .. ' ' .. worker
end

local function remember_claim(origin, number, lease, pairs_claimed)
  call('SET', claim_of(origin), number .. pairs_claimed, 'PX', lease)
end
