-- uses: allow-oom | common jobs outbox lanes leaving rates finish
-- ARGV: id, fence, result, usage, notes, actual cost ('' = as estimated) for each. Answers one word for each.
local answers = {}
local ended = 0

local function complete(id, fence, result, usage, notes, cost)
  local job = read(id)
  if not holds(job, fence) then
    return answer_given(id, fence)
  end
  if cost ~= '' then
    charge(job.tenant, tonumber(cost) - tonumber(job.charged or job.cost))
  end
  release(job)
  finish(job, 'succeeded', '', pack_outcome(result, false, usage, notes), usage, 'settled:' .. fence, 'done')
  ended = ended + 1
  return 'done'
end

for i = 1, #ARGV, 6 do
  answers[#answers + 1] = complete(unpack(ARGV, i, i + 5))
end
if ended > 0 then
  observe('drained', ended)
end
flush()
return answers
