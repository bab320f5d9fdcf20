-- wrk: POSTs of one order. Without KEYS every request has a key of its own; with KEYS=n they go round n keys, so that
-- after the first round all are replays. RUN keeps the keys of several runs apart. With PACE=ms each connection pauses
-- between two requests.
local run = os.getenv("RUN") or "run"
local keys = tonumber(os.getenv("KEYS") or "0")
local body = '{"customer_id":"c-1029","sku":"A-77","quantity":3,"amount":"129.90","currency":"EUR","note":"please ring twice"}'
local threads = 0
function setup(thread) thread:set("tid", threads); threads = threads + 1 end
local head, n = nil, 0
function init(args)
  head = "POST /orders HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX-Tenant-Id: acme\r\nContent-Length: "
    .. #body .. "\r\nIdempotency-Key: " .. run .. "-" .. tid .. "-"
end
local pace = tonumber(os.getenv("PACE") or "0")
if pace > 0 then function delay() return pace end end
function request()
  n = n + 1
  local key = keys > 0 and (n % keys) or n
  return head .. key .. "\r\n\r\n" .. body
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %.0f %d %.2f %.2f\n", summary.requests / summary.duration * 1e6,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
