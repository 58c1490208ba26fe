// The last errors with their messages, and the faults since the start.

const SHOWN_ERRORS = 8;

class Errors {
  constructor() {
    this.list = new Keyed(byId("errors"), () => this.create());
  }

  create() {
    const view = { root: make("li", "error"), line: make("div", "line") };
    for (const part of ["code", "count", "model", "when", "message", "id"]) {
      view[part] = make("span", part === "id" ? "id mono" : part);
      (part === "message" || part === "id" ? view.root : view.line).append(view[part]);
    }
    view.root.prepend(view.line);
    return view;
  }

  draw(frame) {
    const records = frame.recent_errors.slice(0, SHOWN_ERRORS);
    byId("errors-empty").hidden = records.length > 0;
    setText(byId("errors-note"), records.length ? "the latest first" : "");
    this.list.draw(records, ({ status, code, model, message }) => JSON.stringify([status, code, model, message]), (view, record) => {
      view.count.hidden = record.count < 2;
      setText(view.count, `×${record.count}`);
      explain(view.count, `${record.count} equal errors among the last errors. Time and id are those of the latest.`);
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
      ["worker_restarts", "Worker restarts", "Workers that died and were started again, by cause. signal-9 is a kill, often by the kernel for lack of memory."],
      ["retries", "Requests sent again", "A worker died or went away, and another worker computed the request. The client saw nothing of it."],
      ["out_of_memory", "Batches out of memory", "Batches that were split because the device had too little memory."],
      ["leases_revoked", "Results taken back", "Results in shared memory that were freed before they were sent, because their client read too slowly or a frontend died."],
      ["poison", "Inputs refused as poison", "Inputs that crashed two workers, and are refused for a while."],
    ].map(([key, label, words]) => {
      const row = make("div");
      const value = make("dd");
      const name = make("dt");
      name.append(term(label, words));
      row.append(name, value);
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
