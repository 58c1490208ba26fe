// The top of the page: how the server is, in a sentence, and where and since when it runs.

const HEALTH = {
  ready: ["Ready", "good"], degraded: ["Degraded", "warn"], starting: ["Starting", "warn"],
  down: ["Down", "bad"], draining: ["Draining", "warn"],
};

// The sentence of a state, and its tone, at every place that tells them.
function tellHealth(label, tone, told) {
  setText(byId("readiness"), told ? `${label}: ${told}` : label);
  setTone(byId("health"), tone);
  document.title = `${label} · Penstock`;
}

class Header {
  constructor() {
    this.problems = new Keyed(byId("problems"), () => ({ root: make("li") }));
  }

  draw(frame) {
    const { server, health } = frame;
    setText(byId("version"), server.penstock_version);
    setText(byId("host"), server.host);
    setText(byId("uptime"), asDuration(server.uptime_seconds));
    setText(byId("processes"), `${plural(server.frontends, "frontend")}, ${plural(frame.devices.length, "worker")}`);
    const [label, tone] = HEALTH[health.state];
    const [first, ...others] = health.problems.map(asProblem);
    tellHealth(label, tone, first || health.why);
    const quiet = health.state === "ready" ? [`${workersServe(frame.devices.length)}, ${frame.loaded_models.length} of ${plural(frame.models.length, "model")} loaded`] : [];
    this.problems.draw([...quiet, ...others], (text) => text, (view, text) => setText(view.root, text));
    setText(byId("stamp"), `Last frame ${asClock(frame.timestamp)}`);
  }
}

function workersServe(count) {
  return count === 1 ? "1 worker serves" : `${count} workers serve`;
}
