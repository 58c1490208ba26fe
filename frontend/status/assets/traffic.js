// The charts of the whole server, over 90 seconds, 15 minutes or the last hour.

// Label, seconds, and up to which age of the server's figures the range is the one that a page begins with.
const RANGES = [["90 s", LIVE_S, 240], ["15 min", 900, 1800], ["1 h", HOUR_S, Infinity]];

const CHARTS = [
  {
    id: "requests", name: "Requests", unit: "/s", least: 1, empty: "No requests in this time",
    words: "Requests that ended in a second, of all protocols, with errors. A mean of the last 3 seconds.",
    series: [{ track: "requests", name: "requests/s", className: "one" }],
    asValue: asCount, now: (past) => asCount(past.rate("requests").value),
  },
  {
    id: "latency", name: "Latency", unit: "", least: 1, empty: "No answers in this time",
    words: "From the first byte of a request to the end of its answer. p50: half of the answers were faster. p99: 99 of 100 were faster. Of the last 30 seconds, errors left out.",
    series: [{ track: "p50", name: "p50", className: "one" }, { track: "p99", name: "p99", className: "two" }],
    asValue: asMs, asAxis: asMsAxis, now: (past, frame) => asMs(frame.latency.p50_ms), aside: (past, frame) => ["p99", asMs(frame.latency.p99_ms)],
  },
  {
    id: "tokens", name: "Tokens", unit: "/s", least: 1, empty: "No tokens in this time",
    words: "Tokens that models read or wrote in a second: the work that the devices did. A mean of the last 3 seconds.",
    series: [{ track: "tokens", name: "tokens/s", className: "one" }],
    asValue: asCount, now: (past) => asCount(past.rate("tokens").value),
  },
  {
    id: "load", name: "In flight", unit: "", least: 4, empty: "Nothing was in flight",
    words: "In flight: requests that are being served now. Waiting: their texts, images or rows that no device has begun.",
    series: [{ track: "inFlight", name: "requests in flight", className: "one" }, { track: "waiting", name: "items waiting", className: "two" }],
    asValue: asCount, now: (past, frame) => asCount(frame.totals.in_flight), aside: (past, frame) => ["waiting", asCount(waiting(frame))],
  },
  {
    id: "busy", name: "Devices busy", unit: "", top: 1, empty: "No device had work",
    words: "Share of the time in which the devices computed a batch, as a mean over all workers. At 100 % the devices are the limit.",
    series: [{ track: "busy", name: "busy", className: "one" }],
    asValue: asPercent, now: (past, frame) => asPercent(busy(frame)),
  },
  {
    id: "errors", name: "Errors", unit: "/s", least: 1, empty: "No errors in this time",
    words: "Answers of 400 and above in a second. Clients that went away do not count. The list of errors below has the messages.",
    series: [{ track: "errors", name: "errors/s", className: "bad" }],
    asValue: asCount, now: (past) => asCount(past.rate("errors").value),
  },
];

class Traffic {
  constructor(past) {
    this.past = past;
    this.seconds = 0;
    const cursor = new Cursor();
    this.cards = CHARTS.map((spec) => this.card(cursor, spec));
    this.buttons = RANGES.map(([label, seconds]) => {
      const button = make("button", "range", label);
      button.type = "button";
      button.addEventListener("click", () => {
        this.seconds = seconds;
        if (this.last) this.draw(this.last);
      });
      byId("ranges").append(button);
      return [button, seconds];
    });
  }

  card(cursor, spec) {
    const root = make("article", "card tile");
    root.id = `tile-${spec.id}`;
    const said = make("div", "said");
    const number = make("div", "value");
    const text = make("span");
    const unit = make("span", "unit", spec.unit);
    const aside = make("div", "aside");
    number.append(text, unit);
    const label = make("div", "label");
    label.append(term(spec.name, spec.words));
    said.append(label, number, aside);
    const chart = new Chart(cursor, spec);
    root.append(said, chart.root);
    byId("charts").append(root);
    const value = make("b");
    const what = make("span");
    if (spec.aside) aside.append(make("i", "swatch two"), what, value);
    return (frame, seconds, downs, deaths) => {
      const [shown, of] = spec.unit ? [spec.now(this.past, frame), spec.unit] : split(spec.now(this.past, frame));
      setText(text, shown);
      setText(unit, of);
      if (spec.aside) {
        const [name, second] = spec.aside(this.past, frame);
        setText(what, name);
        setText(value, second);
      }
      chart.draw(spec.series.map(({ track: name }) => this.past.points(name, seconds)), this.past.now - seconds, this.past.now, downs, deaths);
    };
  }

  draw(frame) {
    this.last = frame;
    const reach = this.past.reach;
    const seconds = this.seconds || RANGES.find(([, , until]) => reach <= until)[1];
    for (const [button, range] of this.buttons) button.setAttribute("aria-pressed", String(range === seconds));
    const downs = this.past.downs(seconds);
    const deaths = this.past.deaths(seconds);
    const notes = [deaths.length ? "dashed line: a worker died" : "", downs.length ? "red: a worker was down" : ""];
    setText(byId("traffic-note"), notes.filter(Boolean).join(", "));
    for (const card of this.cards) card(frame, seconds, downs, deaths);
  }
}

// "12.3 ms" as its number and its unit.
function split(text) {
  const at = text.lastIndexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}
