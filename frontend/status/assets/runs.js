// Runs with tools: what each does and for how long, decisions for which they wait, the tool host, the kept files.

const MOST_LAYERS = 12;
const DOING_TONES = { model: "good", tool: "good", approval: "warn" };
const APPROVALS = "/v1/agent/approvals/";
// Marks that show text in another order than the text has: a call must read as the call will run.
const TURNING = /[\u202a-\u202e\u2066-\u2069]/g;
const HOST_FACTS = [
  ["host", "Tool host", "The process that runs code and commands of models."],
  ["sandboxes", "Sandboxes", "Sessions whose interpreter and work directory are kept."],
  ["layers", "Sandbox layers", "What keeps code of models away from this machine."],
  ["missing", "Missing layers", "Layers that this machine does not give, and why. The others hold."],
  ["mcp", "MCP servers", "Servers of tools outside, and the tools that models may call of them."],
  ["files", "Files kept", "Files of clients and of runs in the state directory, counted every two minutes."],
  ["bytes", "Room for files", "Bytes of these files, and the bound above which the oldest are deleted."],
];

class Runs {
  constructor() {
    this.list = new Keyed(byId("runs"), (run) => this.create(run));
    this.facts = new Map(HOST_FACTS.map(([key, label, words]) => {
      const row = make("div");
      const name = make("dt");
      const value = make("dd");
      name.append(term(label, words));
      row.append(name, value);
      byId("tool-host").append(row);
      return [key, { row, value }];
    }));
  }

  draw(frame) {
    const { in_flight: counts, host, state } = frame.agent;
    const total = counts.model + counts.tool + counts.approval;
    byId("runs-section").hidden = !host && !total && !frame.runs.length && !state.files && !state.full;
    byId("runs-empty").hidden = frame.runs.length > 0;
    const said = [];
    if (total) said.push(`${total} under way`);
    if (counts.approval) said.push(`${counts.approval} ${counts.approval === 1 ? "waits" : "wait"} for a decision`);
    if (frame.runs.length && total > frame.runs.length) said.push(`${frame.runs.length} shown`);
    setText(byId("runs-note"), said.join(" · "));
    setText(byId("runs-empty"), total ? "The runs under way are of other keys." : "No run is under way. A run is a request whose model uses tools of this server.");
    this.now = frame.timestamp;
    // Clients may choose ids of requests, so two runs may have the same.
    this.list.draw(frame.runs, (run) => `${run.request_id} ${run.began}`, (view, run) => this.update(view, run));
    this.tell(host, state);
  }

  create() {
    const view = { root: make("li", "run"), line: make("div", "line") };
    view.dot = make("span", "dot");
    view.doing = make("span", "doing");
    for (const part of ["model", "turns", "id"]) view[part] = make("span", part === "id" ? "id mono" : part);
    view.line.append(view.dot, view.doing, view.model, view.turns, view.id);
    view.about = make("p", "muted about");
    view.text = make("pre", "given");
    view.text.tabIndex = 0;
    view.text.setAttribute("aria-label", "Arguments of the call");
    view.decision = new DecisionForm();
    view.root.append(view.line, view.about, view.text, view.decision.root);
    return view;
  }

  update(view, run) {
    const since = asDuration(Math.max(0, this.now - run.since));
    const words = { model: "the model writes", tool: `${run.tool} runs`, approval: `${run.tool} waits for a decision` }[run.doing];
    setTone(view.dot, DOING_TONES[run.doing] || "idle");
    setText(view.doing, `${words}, ${since}`);
    setText(view.model, run.owner ? `${asShortModel(run.model)}, key ${run.owner}` : asShortModel(run.model));
    view.model.title = run.model;
    const made = run.files ? `, ${plural(run.files, "file")}` : "";
    setText(view.turns, `round ${run.round + 1}${made}, ${asDuration(Math.max(0, this.now - run.began))} in all`);
    setText(view.id, asShortId(run.request_id));
    view.id.title = run.request_id;
    // Characters, as the server counts them: `length` counts an emoji twice, so that a cut would not be told.
    const chars = [...(run.arguments || "")].length;
    const cut = known(run.arguments_chars) && run.arguments_chars > chars;
    const notes = [];
    if (run.doing === "approval" && !run.approval_id) notes.push("A key with the scope admin sees the call and may decide here.");
    if (cut) notes.push(`Only the first ${chars} of ${run.arguments_chars} characters are shown.`);
    setText(view.about, notes.join(" "));
    view.about.hidden = !notes.length;
    view.about.classList.toggle("bad", cut);
    view.text.hidden = !run.arguments;
    setText(view.text, (run.arguments || "").replace(TURNING, (mark) => `\\u${mark.charCodeAt(0).toString(16)}`));
    view.decision.draw(run);
  }

  tell(host, state) {
    for (const key of ["host", "sandboxes", "layers", "missing", "mcp"]) this.facts.get(key).row.hidden = !host;
    if (host) {
      const { value } = this.facts.get("host");
      setText(value, `${host.alive ? "alive" : "down"} since ${asClock(host.since)}`);
      value.classList.toggle("bad", !host.alive);
      setText(this.facts.get("sandboxes").value, String(host.sandboxes));
      const layers = Object.entries(host.layers).slice(0, MOST_LAYERS);
      this.facts.get("mcp").row.hidden = !host.mcp;
      if (host.mcp) setText(this.facts.get("mcp").value, `${host.mcp.connected} connected, ${plural(host.mcp.tools, "tool")}`);
      this.listOf("layers", layers.filter(([, said]) => said === "active").map(([name]) => name));
      this.listOf("missing", layers.filter(([, said]) => said !== "active").map(([name, said]) => `${name}: ${said}`));
    }
    setText(this.facts.get("files").value, asCount(state.files));
    const { value } = this.facts.get("bytes");
    setText(value, state.full ? "full: uploads are refused" : `${asBytes(state.bytes)} of ${asBytes(state.max_bytes)}`);
    value.classList.toggle("bad", state.full);
  }

  listOf(key, texts) {
    const { row, value } = this.facts.get(key);
    row.hidden = !texts.length;
    setText(value, texts.join(key === "missing" ? "; " : ", "));
    value.classList.toggle("warned", key === "missing");
  }
}

// The buttons of a call that waits. They stay as they are from frame to frame, so that nobody loses the place.
class DecisionForm {
  constructor() {
    this.root = make("form", "decide");
    this.reason = make("input");
    this.reason.placeholder = "Reason of a denial, for the model";
    this.reason.setAttribute("aria-label", this.reason.placeholder);
    this.reason.autocomplete = "off";
    this.reason.maxLength = 4096;
    this.said = make("span", "outcome");
    this.said.setAttribute("role", "status");
    this.buttons = [
      ["Approve", { decision: "approve" }],
      ["Approve for the session", { decision: "approve", remember_for_session: true }],
      ["Deny", { decision: "deny" }],
    ].map(([label, body]) => {
      const button = make("button", "", label);
      button.type = "button";
      button.addEventListener("click", () => this.decide(body));
      return button;
    });
    // Enter in the reason denies nothing by accident.
    this.root.addEventListener("submit", (event) => event.preventDefault());
    this.root.append(...this.buttons, this.reason, this.said);
    this.id = "";
  }

  draw(run) {
    this.root.hidden = !run.approval_id;
    if (run.approval_id === this.id) return;
    this.id = run.approval_id;
    this.reason.value = "";
    this.say("", false);
    for (const button of this.buttons) button.setAttribute("aria-label", `${button.textContent}: ${run.tool} of ${asShortId(run.request_id)}`);
  }

  say(text, busy) {
    setText(this.said, text);
    for (const button of this.buttons) button.disabled = busy;
  }

  async decide(body) {
    const id = this.id;
    const message = this.reason.value.trim();
    this.say("sending", true);
    try {
      await ask(APPROVALS + encodeURIComponent(id), body.decision === "deny" && message ? { ...body, message } : body, AbortSignal.timeout(SILENCE_MS));
      if (id === this.id) this.say("decided", true);
    } catch (error) {
      if (id !== this.id) return;
      const late = error.message.startsWith("404");
      this.say(late ? "nobody waits for this decision any more" : error.message, late);
    }
  }
}
