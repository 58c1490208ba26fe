// One card for each worker: memory, utilization, the last batches, queue, shared memory, restarts.

const DEVICE_STATES = {
  ready: ["", ""],
  absent: ["down", "Its requests run on the other workers. A new process takes its place."],
  connecting: ["starting", "It takes requests when its first model is loaded."],
  leaving: ["stopping", "It finishes its requests and takes no new ones."],
  unresponsive: ["does not answer", "Requests go to the other workers. The process is killed if it stays silent."],
};
const STATE_TONES = { loaded: "good", loading: "warn", unloading: "warn", failed: "bad", ready: "good", unresponsive: "bad", leaving: "warn", connecting: "warn", absent: "bad" };
const DEVICE_FACTS = [
  ["Busy", "Share of the last seconds in which a batch ran."],
  ["Batch budget", "A batch takes waiting work up to so many tokens, unless a model has a budget of its own."],
  ["Queue", "Tokens that wait or run, and the bound above which new requests are refused."],
  ["Shared memory", "Memory in which finished results wait for the frontends to send them."],
  ["Restarts", "How often this worker was started again since the server began."],
];

const MOST_LOADS = 4;

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
    view.memory = new Meter("Memory", "Memory of the device in use; on CPU of this process, and of the machine. Models are loaded up to the mark.", device.memory_threshold_pct);
    view.utilization = new Meter("Utilization", "What the device says of the last second; on CPU the share of the worker's threads in use.");
    meters.append(view.memory.root, view.utilization.root);
    const plots = make("div", "plots");
    view.chart = new Chart(new Cursor(), {
      name: `Utilization of worker ${device.worker}`, top: 100, asValue: (value) => `${Math.round(value)} %`,
      series: [{ name: "utilization", className: "one" }], empty: "",
    });
    view.batches = new Columns(48, "Fill of the last batches");
    view.batchNote = make("span");
    plots.append(
      plot("Utilization, 90 s", "What the device said in the last 90 seconds.", view.chart.root),
      plot("Last batches", "One bar for each of the last 48 batches: how much of its budget of tokens a batch used. High bars: the device works with little overhead.", view.batches.svg, view.batchNote),
    );
    view.foot = make("div", "device-foot");
    view.facts = DEVICE_FACTS.map(([label, words]) => {
      const item = make("span");
      const value = make("b");
      item.append(term(label, words), " ", value);
      view.foot.append(item);
      return value;
    });
    view.loads = make("div", "meters");
    view.loading = new Keyed(view.loads, ({ model }) => new Meter(`Loading ${model}`, "How far the load of this model has come: files, weights, trials, proof."));
    view.body = [meters, plots, view.foot];
    view.meaning = make("p", "muted");
    view.root.append(head, view.meaning, view.loads, ...view.body);
    return view;
  }

  draw(frame) {
    setText(byId("devices-note"), frame.saturated ? "all queues are full: new requests are refused" : "");
    byId("devices-empty").hidden = frame.devices.length > 0;
    this.now = frame.timestamp;
    this.list.draw(frame.devices, (device) => device.worker, (view, device) => this.update(view, device));
  }

  update(view, device) {
    setTone(view.dot, STATE_TONES[device.state] || "bad");
    setText(view.name, device.name === "cpu" ? `CPU worker ${device.worker}` : device.device);
    const kind = device.name === "cpu" ? plural(device.threads, "thread") : device.name;
    const since = device.since ? ` since ${asClock(device.since)}` : "";
    const again = device.state === "connecting" && device.since;
    const [state, meaning] = DEVICE_STATES[again ? "absent" : device.state] || [device.state, ""];
    const loads = device.state === "ready" ? device.loading : [];
    const loading = loads.map(({ model, progress }) => `loading ${asShortModel(model)} ${Math.round(progress * 100)} %`).slice(0, 1);
    if (loads.length > 1) loading.push(`${loads.length - 1} more`);
    setText(view.kind, device.state === "ready" ? [kind, loading.join(" and ")].filter(Boolean).join(" · ") : `${state}${since}`);
    if (loads.length) setTone(view.dot, STATE_TONES.loading);
    view.loads.hidden = !loads.length;
    view.loading.draw(loads.slice(0, MOST_LOADS), ({ model }) => model, (meter, { progress }) => meter.draw(progress, `${Math.round(progress * 100)} %`));
    setText(view.meaning, meaning);
    view.meaning.hidden = !meaning;
    if (again) setTone(view.dot, STATE_TONES.absent);
    view.root.classList.toggle("away", ["absent", "unresponsive"].includes(device.state) || again);
    setText(view.temp, known(device.temperature_c) ? `${device.temperature_c.toFixed(0)} °C` : "");
    for (const part of view.body) part.hidden = !device.batch;
    if (!device.batch) return;
    const share = device.memory_used_bytes / device.memory_total_bytes;
    const limit = device.memory_threshold_pct / 100;
    view.memory.draw(share, `${asBytes(device.memory_used_bytes)} of ${asBytes(device.memory_total_bytes)}`, share > limit ? "bad" : share > limit - 0.1 ? "warn" : "");
    view.utilization.draw(device.utilization_pct / 100, `${Math.round(device.utilization_pct)} %`);
    view.chart.draw([this.past.points(`device ${device.worker}`, LIVE_S)], this.now - LIVE_S, this.now);
    const batches = device.batch.last;
    const tells = batches.map(([items, tokens, budget, ms]) => `${plural(items, "item")}, ${asCount(tokens)} of ${asCount(budget)} tokens, ${asMs(ms)}`);
    view.batches.draw(batches.map(([, tokens, budget]) => (budget ? tokens / budget : 0)), tells);
    setText(view.batchNote, batches.length ? asPercent(device.batch.fill_ratio) === DASH ? "" : `filled ${asPercent(device.batch.fill_ratio)}` : "none yet");
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

function plot(label, words, drawn, note) {
  const root = make("div", "plotted");
  const line = make("div", "label");
  line.append(term(label, words));
  if (note) line.append(note);
  root.append(line, drawn);
  return root;
}
