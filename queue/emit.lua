-- uses: | common chunks outbox lanes leaving
-- ARGV: id, fence, seq, data ('' = none), what the attempt has cost so far ('' = not said) for each chunk.
-- Answers the ids that these fences don't hold.
local MOST_CHUNKS, TRIM_EVERY = 100000, 1000
local stale = {}

-- What a job costs beyond its estimate counts at once, and not only at its end.
local function account(id, cost)
  local row = call('HMGET', record(id), 'tenant', 'cost', 'charged')
  local charged = tonumber(row[3] or row[2] or 1)
  if cost > charged then
    charge(row[1], cost - charged)
    call('HSET', record(id), 'charged', cost)
  end
end

-- Answers its entry and the one before it, or nothing when it was stored before: entries only rise.
local function store(id, fence, seq, attempt, data)
  local previous = seq == '1' and last_entry(id) or string.format('%s-%d', fence, seq - 1)
  local entry = fence .. '-' .. seq
  local added = redis.pcall('XADD', Q .. 's:' .. id, entry, attempt, data)
  if added.err then
    return not string.find(added.err, 'equal or smaller', 1, true) and error(added.err)
  end
  if seq % TRIM_EVERY == 0 then
    call('XTRIM', Q .. 's:' .. id, 'MAXLEN', '~', MOST_CHUNKS)
  end
  return entry, previous
end

-- A chunk that isn't kept has no entry. Answers nothing when it was told before.
local function count(key, seq)
  if tonumber(seq) > tonumber(call('HGET', key, 'seq') or 0) then
    call('HSET', key, 'seq', seq)
    return '', '0'
  end
end

local function emit(id, fence, seq, data, cost)
  local key = record(id)
  local row = call('HMGET', key, 'state', 'fence', 'attempt', 'gates', 'stream')
  if row[1] ~= 'running' or row[2] ~= fence then
    stale[#stale + 1] = id
    return
  end
  if cost ~= '' then
    account(id, tonumber(cost))
    if data == '' then
      return
    end
  end
  local entry, previous
  if row[5] then
    entry, previous = store(id, fence, seq, row[3], data)
  else
    entry, previous = count(key, seq)
  end
  if entry then
    post(row[4] or '', { 'chunk', id, entry, previous, fence, row[3], data })
  end
end

for i = 1, #ARGV, 5 do
  emit(unpack(ARGV, i, i + 4))
end
flush()
return stale
