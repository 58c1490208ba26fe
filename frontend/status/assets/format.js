// Numbers and instants as text. What nobody knows is a dash.

const DASH = "–";

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function asCount(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(size >= 1e10 ? 1 : 2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 1 : 2)}M`;
  if (size >= 1e5) return `${(value / 1e3).toFixed(0)}k`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(1);
}

function asBytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

function asMs(value) {
  if (!known(value)) return DASH;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
  if (value >= 100) return `${Math.round(value)} ms`;
  return `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

// A time as a label of an axis, without digits that say nothing.
function asMsAxis(value) {
  if (!value) return "0";
  return value >= 1000 ? `${Number((value / 1000).toFixed(2))} s` : `${Number(value.toFixed(2))} ms`;
}

function asPercent(share) {
  if (!known(share)) return DASH;
  const percent = share * 100;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}

function asDuration(seconds) {
  if (!known(seconds)) return DASH;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([name, size], at) => {
    const value = at ? Math.floor((seconds % parts[first][1]) / size) : Math.floor(seconds / size);
    return `${value} ${name}`;
  }).join(" ");
}

// A length of time as a label of an axis.
function asAgo(seconds) {
  if (seconds >= 3600) return `${Math.round(seconds / 360) / 10} h ago`;
  if (seconds >= 120) return `${Math.round(seconds / 6) / 10} min ago`;
  return `${Math.round(seconds)} s ago`;
}

function asClock(unixSeconds, withMs) {
  const date = new Date(unixSeconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withMs ? `${clock}.${String(date.getMilliseconds()).padStart(3, "0")}` : clock;
}

// "1 of 2 workers is down since 14:03:07 (restarting)".
function asProblem(problem) {
  const since = problem.since ? ` since ${asClock(problem.since)}` : "";
  return `${problem.text}${since}${problem.note ? ` (${problem.note})` : ""}`;
}

function asShortId(id) {
  return id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-5)}` : id;
}

// The part of a model's name that tells it from its neighbours.
function asShortModel(name) {
  return name.slice(name.lastIndexOf("/") + 1) || name;
}

function plural(count, one, many) {
  return `${count} ${count === 1 ? one : many || `${one}s`}`;
}
