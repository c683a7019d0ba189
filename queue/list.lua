-- uses: no-writes | common lanes
-- ARGV: section (running, queued, delayed, ended), tenant ('' = all), state ('' = any), a position to continue behind
-- ('' = from the section's start), the most rows. Looks at a bounded number of jobs, in keys that are there anyway.
-- Answers {position to continue behind ('' = the section is over), {id, position, fields} for each job}.
local section, tenant, state, after = unpack(ARGV, 1, 4)
local most = tonumber(ARGV[5])
local MOST_LOOKED_AT, PAGE, CLOCK_SLACK_MS = 2000, 256, 5
local rows, looked, last = {}, 0, ''

-- Whether there is room for more.
local function visit(id, position, ended, as)
  looked, last = looked + 1, position
  local row = call('HMGET', record(id), 'tenant', 'state', 'ended', 'aside', 'fence')
  row[2] = shown_state(row[2], row[4], row[5])
  local fits = row[1] and (tenant == '' or row[1] == tenant) and (state == '' or row[2] == state)
  -- A replayed job has ended before: it is listed where it ended last.
  if fits and (not ended or (row[2] == as and math.abs((row[3] or 0) - ended) <= CLOCK_SLACK_MS)) then
    rows[#rows + 1] = { id, position, call('HGETALL', record(id)) }
  end
  return #rows < most and looked < MOST_LOOKED_AT
end

-- Leases are in the order of their ends, which moves: these go by id.
local function running()
  local ids = call('ZRANGE', Q .. 'lease', 0, -1)
  table.sort(ids)
  for _, id in ipairs(ids) do
    if id > after and not visit(id, id) then
      return last
    end
  end
  return ''
end

local function places_behind(key, found)
  local rest = call('ZRANGE', key, after == '' and '-inf' or '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, most,
    'WITHSCORES')
  for i = 1, #rest, 2 do
    found[#found + 1] = { id = rest[i], place = tonumber(rest[i + 1]) }
  end
end

-- A tenant's own lanes, so that nobody else's queue has to be read.
local function waiting()
  local found = {}
  if tenant == '' then
    places_behind(Q .. 'q', found)
    return found
  end
  for _, priority in ipairs(PRIORITIES) do
    for _, batch in ipairs(call('ZRANGE', lanes_key(priority, tenant), 0, -1)) do
      places_behind(lane_key(priority, tenant, batch), found)
    end
  end
  table.sort(found, function(one, other) return one.place < other.place end)
  return found
end

local function queued()
  local found = waiting()
  for i = 1, math.min(#found, most) do
    if not visit(found[i].id, integer(found[i].place)) then
      return last
    end
  end
  return #found >= most and last or ''
end

local function delayed()
  local score, seen = string.match(after, '^(%S+) (%S+)$')
  local rest = call('ZRANGE', Q .. 'delay', score or '-inf', '+inf', 'BYSCORE', 'LIMIT', 0, MOST_LOOKED_AT + 1,
    'WITHSCORES')
  for i = 1, #rest, 2 do
    local behind = rest[i + 1] ~= score or rest[i] > seen
    if behind and not visit(rest[i], rest[i + 1] .. ' ' .. rest[i]) then
      return last
    end
  end
  return ''
end

-- Nothing for the second record of a job that was stopped.
local function job_and_state(fields)
  local found = {}
  for i = 1, #fields, 2 do
    found[fields[i]] = fields[i + 1]
  end
  return not found.late and found.job, found.state
end

-- Each end has a usage record. What ended before a whole page of jobs that are no longer kept is not kept either.
local function ended()
  local from = after == '' and '+' or after
  while true do
    local entries, kept = call('XREVRANGE', Q .. 'use', from, '-', 'COUNT', PAGE), 0
    for _, entry in ipairs(entries) do
      local id, as = job_and_state(entry[2])
      kept = kept + (id and call('EXISTS', record(id)) or 1)
      if id and not visit(id, entry[1], tonumber(string.match(entry[1], '^%d+')), as) then
        return last
      end
    end
    if #entries < PAGE or kept == 0 then
      return ''
    end
    from = '(' .. entries[#entries][1]
  end
end

local sections = { running = running, queued = queued, delayed = delayed, ended = ended }
return { sections[section](), rows }
