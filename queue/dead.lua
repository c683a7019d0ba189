-- uses: no-writes | common
-- ARGV: tenant ('' = all), the most rows, an id to continue behind ('' = from the newest).
-- Answers id, fields, outcome of each dead letter, the newest job first.
local PAGE = 256
local tenant, most = ARGV[1], tonumber(ARGV[2])
local rows = {}

local function add(id)
  local fields = call('HGETALL', record(id))
  if #fields > 0 and (tenant == '' or call('HGET', record(id), 'tenant') == tenant) then
    rows[#rows + 1] = { id, fields, call('GET', Q .. 'o:' .. id) }
  end
end

local from = ARGV[3] == '' and '+' or '(' .. ARGV[3]
while from and #rows < most do
  local ids = call('ZRANGE', Q .. 'dead', from, '-', 'BYLEX', 'REV', 'LIMIT', 0, PAGE)
  for _, id in ipairs(ids) do
    if #rows < most then
      add(id)
    end
  end
  from = #ids == PAGE and '(' .. ids[PAGE]
end
return rows
