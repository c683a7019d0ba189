-- What wrk sends, and one line of JSON about how it went. Latencies in milliseconds.
wrk.method = 'POST'
wrk.body = '{"x":1}'
wrk.headers['Content-Type'] = 'application/json'

function done(summary, latency)
  local failed = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.3f, "failed": %d, "p50_ms": %.3f, "p99_ms": %.3f}\n',
    summary.requests, summary.duration / 1e6, failed.connect + failed.read + failed.write + failed.status + failed.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
