// The last requests, each a bar of its phases.

const PHASES = ["tokenize", "decode", "queue", "see", "prefill", "write", "device", "copy", "encode", "other"];
const PHASE_WORDS = {
  tokenize: "Texts become tokens, images become tensors.",
  decode: "Pictures of a conversation are decoded and scaled.",
  queue: "Waiting for the device.",
  see: "The vision part of the model makes features of pictures, between the steps of text.",
  prefill: "The model reads the prompt, up to the first token of its answer.",
  write: "The model writes the other tokens.",
  device: "The model computes.",
  copy: "The result is copied from the device.",
  encode: "The answer is written, as JSON for instance.",
  other: "Reading and checking the request, and the way between the processes.",
};
const SHOWN_REQUESTS = 18;
const REQUESTS_EVERY_MS = 1000;

class Requests {
  constructor() {
    this.root = byId("requests");
    this.drawnAt = -Infinity; // The first frame is drawn at once, also in the first second of the page.
    this.held = false;
    for (const phase of PHASES) {
      const item = make("li");
      item.append(make("i", `p-${phase}`), term(phase, PHASE_WORDS[phase]));
      byId("legend").append(item);
    }
    this.root.addEventListener("mouseenter", () => { this.held = true; });
    this.root.addEventListener("mouseleave", () => { this.held = false; });
    this.rows = [];
  }

  draw(frame) {
    const records = frame.recent_requests.slice(0, SHOWN_REQUESTS);
    byId("requests-empty").hidden = records.length > 0;
    byId("example-section").hidden = !records.length;
    const times = records.map((record) => record.total_ms).sort((one, other) => one - other);
    const longest = times.length ? times[times.length - 1] : 0;
    // A few slow requests must not make all other bars too short to read.
    const scale = Math.max(1e-6, Math.min(longest, 4 * times[Math.floor(times.length / 2)] || 0));
    if (this.held) {
      setText(byId("requests-note"), "held while you point at them");
      return;
    }
    const now = performance.now();
    if (now - this.drawnAt < REQUESTS_EVERY_MS) return;
    this.drawnAt = now;
    setText(byId("requests-note"), records.length ? `a whole bar is ${asMs(scale)}${longest > scale ? " or more" : ""}` : "");
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
    row.bar = new PhaseBar();
    row.total = make("span", "total");
    row.root.append(row.when, row.id, row.model, row.bar.root, row.total);
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
    row.bar.draw(record.phases, scale);
  }
}

// The phases of a request side by side, of which `scale` milliseconds fill the bar.
class PhaseBar {
  constructor() {
    this.root = make("span", "bar");
    this.root.setAttribute("role", "img");
    this.parts = PHASES.map((phase) => {
      const part = make("i", `p-${phase}`);
      this.root.append(part);
      return part;
    });
  }

  draw(phases, scale) {
    const said = phases ? PHASES.map((phase) => `${phase} ${asMs(phases[phase])}`).join(", ") : "no answer";
    explain(this.root, said);
    this.root.setAttribute("aria-label", said);
    this.parts.forEach((part, at) => {
      const share = phases ? (phases[PHASES[at]] / scale) * 100 : 0;
      part.hidden = share < 0.15;
      part.style.width = `calc(${Math.min(100, share).toFixed(2)}% - 1px)`;
    });
  }
}
