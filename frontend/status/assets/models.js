// The table of models: searched, sorted, with the profiles of a model folded under it.

const MOST_ROWS = 60;
const SEARCH_FROM = 7;
const REORDER_MS = 2000;
const MODEL_COLUMNS = [
  ["name", "Model", "", "The name that a request names. Profiles are variations of a model with other defaults, under a name of their own."],
  ["state", "State", "", "Loaded models answer at once. An available model is loaded when a request asks for it."],
  ["device", "Device", "", "The devices that have the model in memory."],
  ["memory", "Memory", "num", "Memory that the model takes, added up over its devices."],
  ["waiting", "Waiting", "num", "Items that no device has begun."],
  ["inFlight", "In flight", "num", "Requests that are being served now."],
  ["requests", "Requests/s", "num", "Requests that ended in a second. A mean of the last 3 seconds."],
  ["tokens", "Tokens/s", "num", "Tokens that the model read or wrote in a second."],
  ["fill", "Batch fill", "", "How much of their budget of tokens the batches of the last 10 seconds used."],
  ["p50", "p50", "num", "Half of the answers of the last 30 seconds were faster."],
  ["p99", "p99", "num", "99 of 100 answers of the last 30 seconds were faster."],
];

class Models {
  constructor(past) {
    this.past = past;
    this.all = false;
    this.sortBy = "";
    this.falling = true;
    this.opened = new Set();
    this.orderedAt = -Infinity;
    this.order = new Map();
    this.list = new Keyed(byId("models"), () => this.create());
    this.heads = heads(byId("models-head"), MODEL_COLUMNS, (key) => this.sort(key, key === this.sortBy ? !this.falling : key !== "name" && key !== "state" && key !== "device"));
    const select = byId("models-sort");
    select.append(...[["", "memory, as loaded"], ...MODEL_COLUMNS].map(([key, label]) => {
      const option = make("option", "", label);
      option.value = key;
      return option;
    }));
    select.addEventListener("change", () => this.sort(select.value, !["name", "state", "device"].includes(select.value)));
    byId("models-search").addEventListener("input", () => this.again());
    byId("models-more").addEventListener("click", () => {
      this.all = !this.all;
      this.again();
    });
  }

  sort(key, falling) {
    [this.sortBy, this.falling] = [key, falling];
    byId("models-sort").value = key;
    for (const [name, head] of this.heads) {
      if (name === key) head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    this.again();
  }

  // Draws the last frame once more, in a fresh order.
  again() {
    this.orderedAt = -Infinity;
    if (this.last) this.draw(this.last);
  }

  create() {
    const view = rowOf(MODEL_COLUMNS);
    view.fold = make("button", "fold");
    view.fold.type = "button";
    view.fold.addEventListener("click", () => {
      if (!this.opened.delete(view.base)) this.opened.add(view.base);
      this.again();
    });
    view.name = make("span", "name");
    view.error = make("span", "model-error");
    view.cells.name.append(view.name, view.fold, view.error);
    view.dot = make("span", "dot");
    view.state = make("span");
    view.cells.state.append(view.dot, view.state);
    view.fill = withTrack(view.cells.fill, "Batch fill");
    return view;
  }

  draw(frame) {
    this.last = frame;
    this.names = new Set(frame.models.map((model) => model.name));
    const wanted = byId("models-search").value.trim().toLowerCase();
    byId("models-search").hidden = frame.models.length < SEARCH_FROM;
    setText(byId("models-note"), `${frame.loaded_models.length} of ${frame.models.length} loaded`);
    const found = wanted ? frame.models.filter((model) => model.name.toLowerCase().includes(wanted)) : frame.models;
    const groups = this.groups(found, Boolean(wanted));
    const isActive = (group) => group.members.some((model) => model.state !== "available");
    const active = groups.filter(isActive);
    const idle = groups.length - active.length;
    const shown = this.all || wanted || !active.length ? groups : active;
    const rows = this.ordered(shown).flatMap((group) => [
      { model: group.head, group },
      ...(this.opened.has(group.head.name) ? group.members.filter((model) => model !== group.head).map((model) => ({ model, under: true })) : []),
    ]);
    this.list.draw(rows.slice(0, MOST_ROWS), ({ model }) => model.name, (view, row) => this.update(view, row));
    this.drawMore(idle, active.length, Boolean(wanted));
    const empty = byId("models-empty");
    empty.hidden = rows.length > 0 && rows.length <= MOST_ROWS;
    setText(empty, rows.length ? `${MOST_ROWS} of ${rows.length} models are shown. Search for others by name.`
      : wanted ? `No model has “${wanted}” in its name.` : "No model is served. Start the server with one: penstock serve NAME-OR-PATH");
  }

  drawMore(idle, active, searched) {
    const more = byId("models-more");
    more.hidden = searched || !idle || !active;
    setText(more, this.all ? "Hide models not loaded" : `Show ${idle} not loaded`);
    more.setAttribute("aria-expanded", String(this.all));
  }

  // A model with its profiles; each alone while somebody searches.
  groups(models, flat) {
    const found = new Map();
    for (const model of models) {
      const at = model.name.lastIndexOf(":");
      const base = !flat && at > 0 && this.names.has(model.name.slice(0, at)) ? model.name.slice(0, at) : model.name;
      if (!found.has(base)) found.set(base, { members: [] });
      const group = found.get(base);
      group.members.push(model);
      if (model.name === base) group.head = model;
    }
    return [...found.values()];
  }

  value(model) {
    const values = {
      name: () => model.name, state: () => model.state, device: () => model.devices.join(), memory: () => model.memory_bytes,
      waiting: () => model.queue_pending_items, inFlight: () => model.in_flight, p50: () => model.p50_ms, p99: () => model.p99_ms,
      requests: () => this.past.rate(`requests ${model.name}`).value, tokens: () => this.past.rate(`tokens ${model.name}`).value,
      fill: () => model.adaptive_batching.fill_ratio,
    };
    return values[this.sortBy]();
  }

  // Rows keep their order for a moment, so that they can be read while the figures move.
  ordered(groups) {
    if (!this.sortBy) return groups;
    const now = performance.now();
    if (now - this.orderedAt > REORDER_MS) {
      this.orderedAt = now;
      const sign = this.falling ? -1 : 1;
      const best = (group) => group.members.map((model) => this.value(model)).reduce((one, other) => (compare(one, other) * sign <= 0 ? one : other));
      const keyed = groups.map((group) => [best(group), group]);
      keyed.sort((one, other) => compare(one[0], other[0]) * sign);
      this.order = new Map(keyed.map(([, group], at) => [group.head.name, at]));
    }
    const place = (group) => this.order.get(group.head.name) ?? Infinity;
    return [...groups].sort((one, other) => place(one) - place(other));
  }

  update(view, { model, group, under }) {
    view.base = model.name;
    view.root.classList.toggle("under", Boolean(under));
    setText(view.name, under ? model.name.slice(model.name.lastIndexOf(":")) : model.name);
    view.name.title = model.name;
    const profiles = group ? group.members.length - 1 : 0;
    const members = profiles && !this.opened.has(model.name) ? group.members : [model];
    view.fold.hidden = !profiles;
    setText(view.fold, plural(profiles, "profile"));
    explain(view.fold, "While the profiles are folded, the row adds them up; its times and its fill are the highest of them.");
    view.fold.setAttribute("aria-expanded", String(this.opened.has(model.name)));
    setText(view.error, model.last_error ? `${model.last_error.code}: ${model.last_error.message}` : "");
    setTone(view.dot, STATE_TONES[model.state] || "idle");
    const loading = model.state === "loading" && model.progress > 0 && model.progress < 1;
    // A model that only some workers have has less than all devices.
    const some = model.state === "loaded" && model.devices.length < this.last.devices.length;
    setText(view.state, loading ? `loading ${Math.round(model.progress * 100)} %` : some ? `on ${model.devices.length} of ${this.last.devices.length}` : model.state);
    view.state.title = some ? `Loaded on ${model.devices.length} of ${this.last.devices.length} workers` : "";
    put(view, "device", devicesOf(model), !model.devices.length);
    const sum = (valueOf) => members.reduce((total, member) => total + valueOf(member), 0);
    const most = (valueOf) => members.map(valueOf).filter(known).reduce((one, other) => Math.max(one, other), null);
    const amount = (key, value, shown) => put(view, key, shown, !value);
    const memory = sum((member) => member.memory_bytes);
    amount("memory", memory, memory ? asBytes(memory) : DASH);
    for (const [key, valueOf] of [
      ["waiting", (member) => member.queue_pending_items], ["inFlight", (member) => member.in_flight],
      ["requests", (member) => this.past.rate(`requests ${member.name}`).value],
      ["tokens", (member) => this.past.rate(`tokens ${member.name}`).value],
    ]) {
      amount(key, sum(valueOf), asCount(sum(valueOf)));
    }
    for (const [key, value] of [["p50", most((member) => member.p50_ms)], ["p99", most((member) => member.p99_ms)]]) {
      put(view, key, asMs(value), !known(value));
    }
    const share = most((member) => member.adaptive_batching.fill_ratio);
    view.fill(share, asPercent(share), !known(share));
  }
}

function compare(one, other) {
  if (typeof one === "string") return one < other ? -1 : one > other ? 1 : 0;
  return (known(one) ? one : -1) - (known(other) ? other : -1);
}

// "cpu ×2" for two workers on one kind of device, "3 devices" for many.
function devicesOf(model) {
  const names = [...new Set(model.devices)];
  if (names.length === 1 && model.devices.length > 1) return `${names[0]} ×${model.devices.length}`;
  return names.length > 2 ? `${names.length} devices` : names.join(", ") || DASH;
}
