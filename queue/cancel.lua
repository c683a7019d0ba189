-- uses: allow-oom | common jobs chunks outbox lanes leaving finish
-- ARGV: id, reason. Answers the state after the call, or nothing for an unknown job.
local job = read(ARGV[1])
if not job then
  return false
end
if job.state ~= 'queued' and job.state ~= 'retrying' and job.state ~= 'running' then
  return job.state
end
drop(job, 'cancelled', ARGV[2])
flush()
return 'cancelled'
