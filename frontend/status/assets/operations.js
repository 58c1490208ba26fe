// Requests and latency of each model and operation: figures, where the time goes, and two small charts.

const MOST_OPERATIONS = 12;
const OPERATION_COLUMNS = [
  ["name", "Model", "", "The name that a request names."],
  ["operation", "Operation", "", "What was asked for: vectors (encode), scores, text (generate), and so on."],
  ["requests", "Requests/s", "num", "Requests that ended in a second. A mean of the last 3 seconds."],
  ["p50", "p50", "num", "Half of the answers of the last 30 seconds were faster."],
  ["p99", "p99", "num", "99 of 100 answers of the last 30 seconds were faster."],
  ["phases", "Where the time goes", "wide", "The mean request of the last 30 seconds in its phases. The legend of the recent requests names the colours."],
  ["rate", "Requests/s, 90 s", "wide", "Requests in a second, as this page saw them."],
  ["times", "Latency, 90 s", "wide", "p50 and p99, as this page saw them."],
];

class Operations {
  constructor(past) {
    this.past = past;
    this.list = new Keyed(byId("operations"), (row) => this.create(row));
    heads(byId("operations-head"), OPERATION_COLUMNS);
  }

  create({ model, operation }) {
    const view = rowOf(OPERATION_COLUMNS);
    const key = operationKey({ model, operation });
    view.cells.name.title = model;
    view.phases = new PhaseBar();
    view.cells.phases.append(view.phases.root);
    view.rate = new Spark(view.cells.rate, `Requests of ${model}, ${operation}`, 1, asCount, [[`requests ${key}`, "requests/s", "one"]]);
    view.times = new Spark(view.cells.times, `Latency of ${model}, ${operation}`, 1, asMs, [[`p50 ${key}`, "p50", "one"], [`p99 ${key}`, "p99", "two"]]);
    return view;
  }

  draw(frame) {
    const rows = frame.operations.slice(0, MOST_OPERATIONS);
    byId("operations-section").hidden = !rows.length;
    setText(byId("operations-note"), frame.operations.length > rows.length ? `the ${rows.length} with most requests` : "");
    this.list.draw(rows, operationKey, (view, row) => this.update(view, row));
  }

  update(view, row) {
    const rate = this.past.rate(`requests ${operationKey(row)}`).value;
    put(view, "name", row.model);
    put(view, "operation", row.operation);
    put(view, "requests", asCount(rate), !rate);
    put(view, "p50", asMs(row.p50_ms), !known(row.p50_ms));
    put(view, "p99", asMs(row.p99_ms), !known(row.p99_ms));
    const whole = row.phases ? PHASES.reduce((sum, phase) => sum + row.phases[phase], 0) : 0;
    view.phases.draw(row.phases, whole);
    view.rate.draw(this.past);
    view.times.draw(this.past);
  }
}

function operationKey({ model, operation }) {
  return `${operation} of ${model}`;
}
