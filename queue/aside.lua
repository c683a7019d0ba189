-- uses: allow-oom | common jobs
-- ARGV: id, fence for each. Their worker keeps these jobs and does not run them: readers are told that they wait, and
-- the limit of a run is none of the wait: it begins anew with the next claim. What the whole job has to be finished by
-- stays. Answers how many it has.
local count = 0

for i = 1, #ARGV, 2 do
  local job = read(ARGV[i])
  if holds(job, ARGV[i + 1]) then
    count = count + 1
    call('HSET', job.record, 'aside', job.fence)
    call('ZADD', Q .. 'aside', job.place, job.id)
    if job.finish_by then
      call('ZADD', Q .. 'dl', job.finish_by, job.id)
    else
      call('ZREM', Q .. 'dl', job.id)
    end
  end
end
return count
