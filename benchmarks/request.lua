-- Sends the JSON body of the environment variable WRK_BODY (GET without one) and prints one line that wrk.py reads.
local body = os.getenv("WRK_BODY")
if body and body ~= "" then
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  wrk.headers["Accept"] = "application/json"
  wrk.body = body
end

done = function(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.status + errors.read + errors.write + errors.timeout + errors.connect
  io.write(string.format("RESULT %d %d %d %.1f %.1f\n", summary.requests, failed, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end
