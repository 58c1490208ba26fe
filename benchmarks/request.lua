-- Sends the body in the file that WRK_BODY names (GET without one) with the header fields of WRK_HEADERS, one a line,
-- and prints one line that wrk.py reads.
local path = os.getenv("WRK_BODY")
if path and path ~= "" then
  local file = assert(io.open(path, "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
end
for name, value in string.gmatch(os.getenv("WRK_HEADERS") or "", "([^:\n]+): ([^\n]*)") do
  wrk.headers[name] = value
end

done = function(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.status + errors.read + errors.write + errors.timeout + errors.connect
  io.write(string.format("RESULT %d %d %d %.1f %.1f\n", summary.requests, failed, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end
