// What the last minutes looked like, remembered by this page: rates from counters, and one point per second for charts.

const RATE_WINDOW_S = 3;
const POINTS = 90;

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

// One point per second: the mean of what was noted in it.
class Track {
  constructor() {
    this.points = [];
    this.second = 0;
    this.sum = 0;
    this.count = 0;
  }

  note(time, value) {
    const second = Math.floor(time);
    if (second !== this.second) {
      if (this.count) this.points.push(this.sum / this.count);
      if (this.points.length > POINTS) this.points.shift();
      [this.second, this.sum, this.count] = [second, 0, 0];
    }
    if (known(value)) {
      this.sum += value;
      this.count += 1;
    }
  }
}

// Rates and tracks by name, made when they are first asked for.
class Past {
  constructor() {
    this.rates = new Map();
    this.tracks = new Map();
  }

  rate(name) {
    if (!this.rates.has(name)) this.rates.set(name, new Rate());
    return this.rates.get(name);
  }

  track(name) {
    if (!this.tracks.has(name)) this.tracks.set(name, new Track());
    return this.tracks.get(name);
  }

  // Takes one frame in; called for every frame, drawn or not.
  note(frame) {
    const time = frame.timestamp;
    const byModel = (family, model) => (frame.counters[family] || {})[model] || 0;
    for (const model of frame.models) {
      this.rate(`requests ${model.name}`).note(time, byModel("penstock_requests", model.name));
      this.rate(`tokens ${model.name}`).note(time, byModel("penstock_tokens", model.name));
    }
    const sum = (family) => Object.values(frame.counters[family] || {}).reduce((total, value) => total + value, 0);
    this.rate("requests").note(time, sum("penstock_requests"));
    this.rate("tokens").note(time, sum("penstock_tokens"));
    this.track("requests").note(time, this.rate("requests").value);
    this.track("tokens").note(time, this.rate("tokens").value);
    this.track("load").note(time, load(frame).inFlight);
    this.track("p50").note(time, frame.latency.p50_ms || 0);
    this.track("p99").note(time, frame.latency.p99_ms || 0);
    this.track("fill").note(time, meanFill(frame) || 0);
    for (const device of frame.devices) {
      this.track(`device ${device.worker}`).note(time, device.utilization_pct || 0);
    }
  }
}

function load(frame) {
  return {
    inFlight: frame.models.reduce((total, model) => total + model.in_flight, 0),
    waiting: frame.models.reduce((total, model) => total + model.queue_pending_items, 0),
  };
}

function meanFill(frame) {
  const shares = frame.devices.map((device) => device.batch && device.batch.fill_ratio).filter(known);
  return shares.length ? shares.reduce((total, share) => total + share, 0) / shares.length : null;
}
