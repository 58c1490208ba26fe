// One class per part of the page. Each draws a frame into elements that it makes once.

const PHASES = ["tokenize", "queue", "device", "copy", "encode", "other"];
const STATE_TONES = { loaded: "good", loading: "warn", unloading: "warn", failed: "bad", ready: "good", unresponsive: "bad", leaving: "warn" };
const HEALTH = {
  ready: ["Ready", "good"], degraded: ["Degraded", "warn"], starting: ["Starting", "warn"],
  down: ["Down", "bad"], draining: ["Draining", "warn"],
};
const SHOWN_REQUESTS = 18;
const SHOWN_ERRORS = 8;
const REQUESTS_EVERY_MS = 1000;

class Header {
  draw(frame) {
    const server = frame.server;
    setText(byId("version"), server.penstock_version);
    setText(byId("address"), location.host);
    setText(byId("uptime"), asDuration(server.uptime_seconds));
    const workers = plural(frame.devices.length, "worker");
    setText(byId("processes"), `${plural(server.frontends, "frontend")}, ${workers}`);
    const [label, tone] = HEALTH[frame.health.state];
    const told = frame.health.problems.map(asProblem).join("; ") || frame.health.why;
    setText(byId("readiness"), told ? `${label}: ${told}` : label);
    setTone(byId("readiness"), tone);
    setText(byId("stamp"), `Last frame ${asClock(frame.timestamp)}`);
    document.title = `${label} · Penstock`;
  }
}

class Tiles {
  constructor(past) {
    this.past = past;
    this.tiles = [
      this.tile("requests", "Requests", "/s", () => asCount(past.rate("requests").value)),
      this.tile("tokens", "Tokens", "/s", () => asCount(past.rate("tokens").value)),
      this.tile("load", "In flight", "", (frame) => asCount(load(frame).inFlight), (frame) => `${asCount(load(frame).waiting)} waiting`),
      this.tile("p50", "Latency p50", "", (frame) => asMs(frame.latency.p50_ms)),
      this.tile("p99", "Latency p99", "", (frame) => asMs(frame.latency.p99_ms), (frame) => `of ${asCount(frame.latency.requests)}`),
      this.tile("fill", "Batch fill", "", (frame) => asPercent(meanFill(frame)), null, 1),
    ];
  }

  tile(track, label, unit, value, note, top) {
    const root = make("div", "tile");
    root.id = `tile-${track}`;
    const line = make("div", "label");
    const aside = make("span");
    line.append(make("span", "", label), aside);
    const number = make("div", "value");
    const text = make("span");
    number.append(text);
    if (unit) number.append(make("span", "unit", unit));
    const spark = new Spark(POINTS, top);
    root.append(line, number, spark.svg);
    byId("tiles").append(root);
    return (frame) => {
      const shown = value(frame);
      const at = shown.lastIndexOf(" ");
      if (unit || at < 0) {
        setText(text, shown);
      } else {
        splitUnit(number, text, shown.slice(0, at), shown.slice(at + 1));
      }
      if (note) setText(aside, note(frame));
      spark.draw(this.past.track(track).points);
    };
  }

  draw(frame) {
    for (const draw of this.tiles) draw(frame);
  }
}

function splitUnit(number, text, value, unit) {
  setText(text, value);
  if (!text.nextSibling) number.append(make("span", "unit"));
  setText(text.nextSibling, unit);
}

class Devices {
  constructor(past) {
    this.past = past;
    this.list = new Keyed(byId("devices"), (device) => this.create(device));
  }

  create(device) {
    const view = { root: make("article", "card device") };
    const head = make("div", "device-head");
    view.dot = make("span", "dot");
    view.name = make("span", "name");
    view.kind = make("span", "kind");
    view.temp = make("span", "temp");
    head.append(view.dot, view.name, view.kind, view.temp);
    const meters = make("div", "meters");
    view.memory = new Meter("Memory", device.memory_threshold_pct);
    view.utilization = new Meter("Utilization");
    meters.append(view.memory.root, view.utilization.root);
    const plots = make("div", "plots");
    view.spark = new Spark(POINTS, 100);
    view.batches = new Columns(48, "Fill of the last batches");
    view.batchNote = make("span");
    plots.append(plot("Utilization, last 90 s", view.spark.svg), plot("Last batches", view.batches.svg, view.batchNote));
    view.foot = make("div", "device-foot");
    view.facts = ["Busy", "Batch budget", "Queue", "Shared memory", "Restarts"].map((label) => {
      const item = make("span", "", `${label} `);
      const value = make("b");
      item.append(value);
      view.foot.append(item);
      return value;
    });
    view.body = [meters, plots, view.foot];
    view.root.append(head, ...view.body);
    return view;
  }

  draw(frame) {
    setText(byId("devices-note"), frame.saturated ? "All queues are full" : "");
    this.list.draw(frame.devices, (device) => device.worker, (view, device) => this.update(view, device));
  }

  update(view, device) {
    setTone(view.dot, STATE_TONES[device.state] || "bad");
    setText(view.name, device.name === "cpu" ? `CPU worker ${device.worker}` : device.device);
    const kind = device.name === "cpu" ? plural(device.threads, "thread") : device.name;
    setText(view.kind, device.state === "ready" ? kind : device.state === "absent" ? "down, starting again" : device.state);
    setText(view.temp, known(device.temperature_c) ? `${device.temperature_c.toFixed(0)} °C` : "");
    for (const part of view.body) part.hidden = !device.batch;
    if (!device.batch) return;
    const share = device.memory_used_bytes / device.memory_total_bytes;
    const limit = device.memory_threshold_pct / 100;
    view.memory.draw(share, `${asBytes(device.memory_used_bytes)} of ${asBytes(device.memory_total_bytes)}`, share > limit ? "bad" : share > limit - 0.1 ? "warn" : "");
    view.utilization.draw(device.utilization_pct / 100, `${Math.round(device.utilization_pct)} %`);
    view.spark.draw(this.past.track(`device ${device.worker}`).points);
    view.batches.draw(device.batch.last.map(([, tokens, budget]) => (budget ? tokens / budget : 0)));
    const last = device.batch.last[device.batch.last.length - 1];
    setText(view.batchNote, last ? `${plural(last[0], "item")}, ${asCount(last[1])} tokens, ${asMs(last[3])}` : "none yet");
    const queue = device.queue;
    const memory = device.shared_memory;
    const facts = [
      `${Math.round(device.busy_pct)} %`,
      `${asCount(device.batch.budget_tokens)} tokens`,
      `${asCount(queue.tokens)} of ${asCount(queue.bound_tokens)} tokens`,
      `${asBytes(memory.used_bytes)} of ${asBytes(memory.total_bytes)}`,
      String(device.restarts),
    ];
    facts.forEach((text, at) => setText(view.facts[at], text));
  }
}

function plot(label, svg, note) {
  const root = make("div", "plot");
  const line = make("div", "label");
  line.append(make("span", "", label));
  if (note) line.append(note);
  root.append(line, svg);
  return root;
}

class Models {
  constructor(past) {
    this.past = past;
    this.all = false;
    this.list = new Keyed(byId("models"), () => this.create());
    byId("models-more").addEventListener("click", () => {
      this.all = !this.all;
      if (this.last) this.draw(this.last);
    });
  }

  create() {
    const view = { root: make("tr"), cells: {} };
    const columns = [
      ["name", "", "model-name"], ["state", "", "state"], ["device", "Device", ""], ["memory", "Memory", "num"],
      ["waiting", "Waiting", "num"], ["inFlight", "In flight", "num"], ["requests", "Requests/s", "num"],
      ["tokens", "Tokens/s", "num"], ["fill", "Batch fill", ""], ["p50", "p50", "num"], ["p99", "p99", "num"],
    ];
    for (const [key, label, className] of columns) {
      const cell = make("td", className);
      cell.dataset.label = label;
      view.cells[key] = cell;
      view.root.append(cell);
    }
    view.name = make("span");
    view.error = make("span", "model-error");
    view.cells.name.append(view.name, view.error);
    view.dot = make("span", "dot");
    view.state = make("span");
    view.cells.state.append(view.dot, view.state);
    const fill = make("div", "fill");
    view.fill = track("Batch fill");
    view.fillText = make("span");
    fill.append(view.fill, view.fillText);
    view.cells.fill.append(fill);
    return view;
  }

  draw(frame) {
    this.last = frame;
    const idle = frame.models.filter((model) => model.state === "available");
    const active = frame.models.filter((model) => model.state !== "available");
    const shown = this.all || !active.length ? [...active, ...idle] : active;
    setText(byId("models-note"), `${frame.loaded_models.length} of ${frame.models.length} loaded`);
    const more = byId("models-more");
    more.hidden = !idle.length || !active.length;
    setText(more, this.all ? "Hide those not loaded" : `Show ${idle.length} not loaded`);
    more.setAttribute("aria-expanded", String(this.all));
    this.list.draw(shown, (model) => model.name, (view, model) => this.update(view, model));
  }

  update(view, model) {
    setText(view.name, model.name);
    view.name.title = model.name;
    setText(view.error, model.last_error ? `${model.last_error.code}: ${model.last_error.message}` : "");
    setTone(view.dot, STATE_TONES[model.state] || "idle");
    const loading = model.state === "loading" && model.progress > 0 && model.progress < 1;
    setText(view.state, loading ? `loading ${Math.round(model.progress * 100)} %` : model.state);
    const put = (key, text, zero) => {
      setText(view.cells[key], text);
      view.cells[key].classList.toggle("zero", Boolean(zero));
    };
    put("device", model.devices.length > 2 ? `${model.devices.length} devices` : model.devices.join(", ") || DASH, !model.devices.length);
    put("memory", model.memory_bytes ? asBytes(model.memory_bytes) : DASH, !model.memory_bytes);
    put("waiting", asCount(model.queue_pending_items), !model.queue_pending_items);
    put("inFlight", asCount(model.in_flight), !model.in_flight);
    const requests = this.past.rate(`requests ${model.name}`).value;
    const tokens = this.past.rate(`tokens ${model.name}`).value;
    put("requests", asCount(requests), !requests);
    put("tokens", asCount(tokens), !tokens);
    put("p50", asMs(model.p50_ms), !known(model.p50_ms));
    put("p99", asMs(model.p99_ms), !known(model.p99_ms));
    const share = model.adaptive_batching.fill_ratio;
    fillTrack(view.fill, share);
    setText(view.fillText, asPercent(share));
  }
}

class Requests {
  constructor() {
    this.root = byId("requests");
    this.drawnAt = 0;
    this.held = false;
    for (const phase of PHASES) {
      const item = make("li");
      item.append(make("i", `p-${phase}`), phase);
      byId("legend").append(item);
    }
    this.root.addEventListener("mouseenter", () => { this.held = true; });
    this.root.addEventListener("mouseleave", () => { this.held = false; });
    this.rows = [];
  }

  draw(frame) {
    const records = frame.recent_requests.slice(0, SHOWN_REQUESTS);
    byId("requests-empty").hidden = records.length > 0;
    const scale = Math.max(1e-6, ...records.map((record) => record.total_ms));
    if (this.held) {
      setText(byId("requests-note"), "held while you point at them");
      return;
    }
    const now = performance.now();
    if (now - this.drawnAt < REQUESTS_EVERY_MS) return;
    this.drawnAt = now;
    setText(byId("requests-note"), records.length ? `full width ${asMs(scale)}` : "");
    while (this.rows.length < records.length) this.rows.push(this.create());
    this.rows.forEach((row, at) => {
      row.root.hidden = at >= records.length;
      if (at < records.length) this.update(row, records[at], scale);
    });
  }

  create() {
    const row = { root: make("li", "request") };
    row.when = make("span", "when");
    row.id = make("span", "id mono");
    row.model = make("span", "model");
    row.bar = make("span", "bar");
    row.bar.setAttribute("role", "img");
    row.total = make("span", "total");
    row.phases = PHASES.map((phase) => {
      const part = make("i", `p-${phase}`);
      row.bar.append(part);
      return part;
    });
    row.root.append(row.when, row.id, row.model, row.bar, row.total);
    this.root.append(row.root);
    return row;
  }

  update(row, record, scale) {
    setText(row.when, asClock(record.time, true));
    setText(row.id, asShortId(record.request_id));
    row.id.title = record.request_id;
    setText(row.model, record.status < 400 ? asShortModel(record.model) : `${record.status} ${record.code}`);
    row.model.classList.toggle("bad", record.status >= 400);
    row.model.title = `${record.operation} ${record.model}`;
    setText(row.total, asMs(record.total_ms));
    const said = PHASES.map((phase) => `${phase} ${asMs(record.phases[phase])}`).join(", ");
    row.bar.title = said;
    row.bar.setAttribute("aria-label", said);
    row.phases.forEach((part, at) => {
      const share = (record.phases[PHASES[at]] / scale) * 100;
      part.hidden = share < 0.15;
      part.style.width = `calc(${share.toFixed(2)}% - 1px)`;
    });
  }
}

class Errors {
  constructor() {
    this.list = new Keyed(byId("errors"), () => this.create());
  }

  create() {
    const view = { root: make("li", "error") };
    for (const part of ["code", "model", "message", "when", "id"]) {
      view[part] = make("span", part === "id" ? "id mono" : part);
      view.root.append(view[part]);
    }
    return view;
  }

  draw(frame) {
    const records = frame.recent_errors.slice(0, SHOWN_ERRORS);
    byId("errors-empty").hidden = records.length > 0;
    setText(byId("errors-note"), records.length ? `last ${records.length}` : "");
    this.list.draw(records, (record) => `${record.time} ${record.request_id}`, (view, record) => {
      setText(view.code, `${record.status} ${record.code}`);
      setText(view.message, record.message);
      setText(view.when, asClock(record.time));
      setText(view.id, record.request_id);
      setText(view.model, record.model);
      view.model.title = record.model;
    });
  }
}

class Faults {
  constructor() {
    this.rows = [
      ["worker_restarts", "Worker restarts"], ["retries", "Requests sent again"], ["out_of_memory", "Batches out of memory"],
      ["leases_revoked", "Leases taken back"], ["poison", "Inputs refused as poison"],
    ].map(([key, label]) => {
      const row = make("div");
      const value = make("dd");
      row.append(make("dt", "", label), value);
      byId("faults").append(row);
      return [key, value];
    });
  }

  draw(frame) {
    for (const [key, value] of this.rows) {
      const found = Object.entries(frame.faults[key]);
      const total = found.reduce((sum, [, count]) => sum + count, 0);
      setText(value, total ? `${asCount(total)} (${found.map(([reason]) => reason).join(", ")})` : "0");
      value.classList.toggle("zero", !total);
    }
  }
}

class Example {
  constructor() {
    this.command = "";
    byId("copy").addEventListener("click", () => this.copy());
  }

  draw(frame) {
    const model = frame.models.find((one) => one.state === "loaded" && one.config.inputs.includes("text"));
    const command = model ? curl(model, frame.server.keys_required) : "";
    if (command === this.command) return;
    this.command = command;
    setText(byId("example"), command || "Waiting for a model.");
  }

  async copy() {
    const button = byId("copy");
    try {
      await navigator.clipboard.writeText(this.command);
      setText(button, "Copied");
    } catch {
      // Without TLS a page may not write to the clipboard, but it may select.
      getSelection().selectAllChildren(byId("example"));
      setText(button, "Selected");
    }
    setTimeout(() => setText(button, "Copy"), 1500);
  }
}

function curl(model, keyed) {
  const outputs = model.config.outputs;
  if (outputs.includes("chat")) {
    const messages = [{ role: "user", content: "What is a penstock?" }];
    return request("/v1/chat/completions", { model: model.name, messages, max_tokens: 64, stream: true }, keyed);
  }
  let [operation, body] = ["encode", { items: [{ text: "A river runs through it." }] }];
  if (outputs.includes("json")) {
    [operation, body] = ["extract", { items: [{ text: "Ada Lovelace lived in London." }], labels: ["person", "city"] }];
  } else if (outputs.length === 1 && outputs[0] === "score") {
    [operation, body] = ["score", { query: { text: "What is a penstock?" }, items: [{ text: "A gate for water." }, { text: "A bird." }] }];
  }
  const path = model.name.split("/").map(encodeURIComponent).join("/").replaceAll("%3A", ":");
  return request(`/v1/${operation}/${path}`, body, keyed);
}

function request(path, body, keyed) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [
    `curl ${quoted(`${location.origin}${path}`)}`,
    "-H 'Content-Type: application/json'",
    "-H 'Accept: application/json'",
    ...(keyed ? ["-H \"Authorization: Bearer $PENSTOCK_KEY\""] : []),
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  return lines.join(" \\\n  ");
}
