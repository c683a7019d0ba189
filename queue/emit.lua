-- uses: | common outbox lanes leaving
-- ARGV: id, fence, seq, data ('' = none), what the attempt has cost so far ('' = not said) for each chunk.
-- Answers the ids that these fences don't hold.
local MOST_CHUNKS, TRIM_EVERY = 100000, 1000
local stale = {}

-- What a job costs beyond its estimate counts at once, and not only at its end.
local function account(id, cost)
  local row = call('HMGET', record(id), 'tenant', 'cost', 'charged')
  local charged = tonumber(row[3] or row[2])
  if cost > charged then
    charge(row[1], cost - charged)
    call('HSET', record(id), 'charged', cost)
  end
end

local function emit(id, fence, seq, data, cost)
  local row = call('HMGET', record(id), 'state', 'fence', 'seq', 'stream', 'gates', 'last', 'attempt')
  if row[1] ~= 'running' or row[2] ~= fence then
    stale[#stale + 1] = id
    return
  end
  if tonumber(seq) <= tonumber(row[3] or 0) then
    return
  end
  if cost ~= '' then
    account(id, tonumber(cost))
    if data == '' then
      call('HSET', record(id), 'seq', seq)
      return
    end
  end
  local entry = ''
  if row[4] then
    entry = call('XADD', Q .. 's:' .. id, '*', 'f', fence, 'a', row[7], 'd', data)
    if seq % TRIM_EVERY == 0 then
      call('XTRIM', Q .. 's:' .. id, 'MAXLEN', '~', MOST_CHUNKS)
    end
    call('HSET', record(id), 'seq', seq, 'last', entry)
  else
    call('HSET', record(id), 'seq', seq)
  end
  post(row[5] or '', { 'chunk', id, entry, row[6] or '0', fence, row[7], data })
end

for i = 1, #ARGV, 5 do
  emit(unpack(ARGV, i, i + 4))
end
flush()
return stale
