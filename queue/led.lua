-- uses: | common
-- ARGV: id, id of a job of the same function that the code of the first led to. Answers 1, or 0 when the first runs no
-- more: then nobody has to know.
if call('HGET', record(ARGV[1]), 'state') ~= 'running' then
  return 0
end
call('HSET', record(ARGV[1]), 'led', ARGV[2])
return 1
