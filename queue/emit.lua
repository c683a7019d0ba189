-- uses: | common outbox
-- ARGV: id, fence, seq, data for each chunk. Answers the ids that these fences don't hold.
local MOST_CHUNKS, TRIM_EVERY = 100000, 1000
local stale = {}

local function emit(id, fence, seq, data)
  local row = call('HMGET', record(id), 'state', 'fence', 'seq', 'stream', 'gates', 'last', 'attempt')
  if row[1] ~= 'running' or row[2] ~= fence then
    stale[#stale + 1] = id
    return
  end
  if tonumber(seq) <= tonumber(row[3] or 0) then
    return
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

for i = 1, #ARGV, 4 do
  emit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
flush()
return stale
