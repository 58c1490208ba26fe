// What the charts show: the last hour as the server kept it, and the last seconds as this page saw them.

const RATE_WINDOW_S = 3;
const LIVE_S = 90;
const SETTLE_S = 2;
const HOUR_S = 3600;
const STEP_S = 10;
const LONGEST_PAUSE_S = 5;
const KEPT = { requests: 1, errors: 2, tokens: 3, p50: 4, p99: 5, inFlight: 6, waiting: 7, busy: 8, down: 9, deaths: 10 };

// Rate of a counter over the last seconds. A counter that went back belongs to a new life of the server.
class Rate {
  constructor() {
    this.samples = [];
  }

  note(time, count) {
    const last = this.samples[this.samples.length - 1];
    if (last && (count < last[1] || time <= last[0])) this.samples = [];
    this.samples.push([time, count]);
    while (this.samples.length > 2 && time - this.samples[1][0] >= RATE_WINDOW_S) this.samples.shift();
  }

  get value() {
    if (this.samples.length < 2) return 0;
    const [first, last] = [this.samples[0], this.samples[this.samples.length - 1]];
    return (last[1] - first[1]) / (last[0] - first[0]);
  }
}

// One point per second of the last seconds: the mean of what was noted in it. The present second has a point as well.
class Track {
  constructor() {
    this.points = [];
    this.second = 0;
    this.now = 0;
    this.sum = 0;
    this.count = 0;
  }

  note(time, value) {
    const second = Math.floor(time);
    if (second !== this.second) {
      if (this.count || this.points.length) this.points.push([this.second + 0.5, this.count ? this.sum / this.count : null]);
      while (this.points.length && this.points[0][0] < time - LIVE_S - 2) this.points.shift();
      [this.second, this.sum, this.count] = [second, 0, 0];
    }
    this.now = time;
    if (known(value)) {
      this.sum += value;
      this.count += 1;
    }
  }

  get all() {
    return this.count ? [...this.points, [this.now, this.sum / this.count]] : this.points;
  }
}

// Rates and tracks by name, made when they are first asked for, and the points of the server's history.
class Past {
  constructor() {
    this.rates = new Map();
    this.tracks = new Map();
    this.history = [];
    this.now = 0;
    this.began = 0;
    this.watched = 0;
    this.outages = [];
    this.isOut = false;
    this.dead = [];
    this.workers = new Map();
  }

  rate(name) {
    if (!this.rates.has(name)) this.rates.set(name, new Rate());
    return this.rates.get(name);
  }

  track(name) {
    if (!this.tracks.has(name)) this.tracks.set(name, new Track());
    return this.tracks.get(name);
  }

  // Seconds that are known of, up to an hour.
  get reach() {
    const live = this.track("requests").points[0];
    const first = Math.min(this.history.length ? this.history[0][0] : Infinity, live ? live[0] : Infinity);
    return Number.isFinite(first) ? this.now - first : 0;
  }

  // [time, value] of the last `seconds`: points of the server, and then what this page has seen since.
  points(name, seconds) {
    const column = KEPT[name];
    const from = this.now - seconds;
    const kept = this.history.filter((point) => column && point[0] >= from).map((point) => [point[0], point[column]]);
    const live = this.track(name).all.filter(([time]) => time >= from);
    if (seconds <= LIVE_S) return [...kept.filter(([time]) => !live.length || time < live[0][0]), ...live];
    const newest = kept.length ? kept[kept.length - 1][0] : 0;
    const seen = live.filter(([time, value]) => time > newest && known(value)).map(([, value]) => value);
    return seen.length ? [...kept, [this.now, seen.reduce((sum, value) => sum + value, 0) / seen.length]] : kept;
  }

  // [from, to] in which some worker did not serve: to the moment since this page watches, before in the server's steps.
  downs(seconds) {
    const kept = this.history.filter((point) => point[KEPT.down]).map(([time]) => [time - STEP_S, Math.min(time, this.watched || time)]);
    return [...kept, ...this.outages].filter(([from, to]) => from < to && to >= this.now - seconds);
  }

  // [time, words] of workers that died: to the moment where this page saw it, else the ends of the server's ten seconds.
  deaths(seconds) {
    const from = this.now - seconds;
    const told = this.history.filter((point) => point[KEPT.deaths] && !this.dead.some(([time]) => time > point[0] - 11 && time <= point[0] + 1));
    return [...told.map((point) => [point[0], `${plural(point[KEPT.deaths], "worker")} died`]), ...this.dead].filter(([time]) => time >= from);
  }

  // A worker that goes without having said so has died.
  look(device) {
    const before = this.workers.get(device.worker) || {};
    const gone = isGone(device);
    const leaves = device.state === "leaving" || (gone && before.leaves);
    if (gone && !leaves && before.since !== device.since) this.dead.push([device.since, `worker ${device.worker} died`]);
    this.workers.set(device.worker, { since: gone ? device.since : 0, leaves });
    while (this.dead.length && this.dead[0][0] < this.now - HOUR_S) this.dead.shift();
  }

  // Frames that stay out for long leave a time of which only the server's history tells.
  watch(devices, time) {
    if (!this.watched || time - this.now > LONGEST_PAUSE_S) [this.watched, this.isOut] = [time, false];
    const gone = devices.filter(isLost);
    if (!gone.length) this.isOut = false;
    else if (this.isOut) this.outages[this.outages.length - 1][1] = time;
    else {
      this.outages.push([Math.min(...gone.map((device) => device.since || time)), time]);
      this.isOut = true;
    }
    while (this.outages.length && this.outages[0][1] < time - HOUR_S) this.outages.shift();
  }

  // Takes one frame in; called for every frame, drawn or not.
  note(frame) {
    const time = frame.timestamp;
    this.watch(frame.devices, time);
    this.now = time;
    if (frame.history) this.take(frame.history.points);
    const byModel = (family, model) => (frame.counters[family] || {})[model] || 0;
    for (const model of frame.models) {
      this.rate(`requests ${model.name}`).note(time, byModel("penstock_requests", model.name));
      this.rate(`tokens ${model.name}`).note(time, byModel("penstock_tokens", model.name));
    }
    for (const row of frame.operations) this.rate(`requests ${operationKey(row)}`).note(time, row.requests);
    for (const device of frame.devices) this.look(device);
    const totals = frame.totals;
    for (const name of ["requests", "errors", "tokens"]) this.rate(name).note(time, totals[name]);
    // Rates and shares of the first moments are those of too short a time.
    this.began = this.began || time;
    if (time - this.began < SETTLE_S) return;
    for (const name of ["requests", "errors", "tokens"]) this.track(name).note(time, this.rate(name).value);
    this.track("p50").note(time, frame.latency.p50_ms);
    this.track("p99").note(time, frame.latency.p99_ms);
    this.track("inFlight").note(time, totals.in_flight);
    this.track("waiting").note(time, waiting(frame));
    this.track("busy").note(time, busy(frame));
    for (const row of frame.operations) {
      const key = operationKey(row);
      this.track(`requests ${key}`).note(time, this.rate(`requests ${key}`).value);
      this.track(`p50 ${key}`).note(time, row.p50_ms);
      this.track(`p99 ${key}`).note(time, row.p99_ms);
    }
    for (const device of frame.devices) {
      this.track(`device ${device.worker}`).note(time, device.utilization_pct);
    }
  }

  take(points) {
    const newest = this.history.length ? this.history[this.history.length - 1][0] : 0;
    this.history.push(...points.filter((point) => point[0] > newest));
    while (this.history.length && this.history[0][0] < this.now - HOUR_S - 60) this.history.shift();
  }
}

// Whether a worker that was there is not.
function isGone(device) {
  return device.since && (device.state === "absent" || device.state === "connecting");
}

function isLost(device) {
  return isGone(device) || device.state === "leaving" || device.state === "unresponsive";
}

function waiting(frame) {
  return frame.models.reduce((total, model) => total + model.queue_pending_items, 0);
}

function busy(frame) {
  const shares = frame.devices.map((device) => (known(device.busy_pct) ? device.busy_pct / 100 : 0));
  return shares.length ? shares.reduce((total, share) => total + share, 0) / shares.length : null;
}
