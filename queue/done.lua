-- uses: allow-oom | common jobs chunks outbox lanes leaving rates finish
-- ARGV: id, fence, result, usage, notes, actual cost ('' = as estimated) for each. Answers one word for each.
local answers, ended = {}, {}

local function complete(id, fence, result, usage, notes, cost)
  local job = read(id)
  if not holds(job, fence) then
    return answer_given(job, fence)
  end
  if cost ~= '' then
    charge(job.tenant, tonumber(cost) - tonumber(job.charged or job.cost))
  end
  finish(job, 'succeeded', '', pack_outcome(result, false, usage, notes), usage)
  ended[#ended + 1] = job
  return 'done'
end

for i = 1, #ARGV, 6 do
  answers[#answers + 1] = complete(unpack(ARGV, i, i + 5))
end
if ended[1] then
  release(ended)
  observe('drained', #ended)
end
flush()
return answers
