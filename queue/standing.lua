-- Claims that found no work and stand for a while: the next jobs, as many as they have room for, go straight to their
-- worker, which spares it the bell and a round trip. A message that is lost costs nothing but that: the next claim says which stand it heard nothing of,
-- and is answered with the jobs.
local STANDING = Q .. 'st'

local function claim_of(origin)
  return Q .. 'c:' .. origin
end

local function standing_entry(origin, number, room, lease, worker)
  return origin .. ' ' .. number .. ' ' .. room .. ' ' .. lease .. ' ' .. worker
end

-- The fence of its first job; those of the others follow in a row.
local function remember_claim(origin, number, lease, fence, ids)
  call('SET', claim_of(origin), number .. ' ' .. integer(fence) .. ' ' .. ids, 'PX', lease)
end
