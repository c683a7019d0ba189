-- A job's kept chunks. The entry of a chunk is its attempt's fence and its number in it, so that a chunk that is sent
-- again is told from a new one; its one field is named by the attempt. The mark where an attempt ended comes behind its
-- last chunk.
local function last_entry(id)
  local last = call('XREVRANGE', Q .. 's:' .. id, '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0'
end

-- Answers the mark's entry ('' when nothing was kept) and the one before it.
local function mark_boundary(job)
  local previous = job.stream and last_entry(job.id) or '0'
  if previous == '0' then
    return '', previous
  end
  return call('XADD', Q .. 's:' .. job.id, '*', 'f', job.fence, 'a', job.attempt), previous
end
