// Lines over time with axes. Pointing, touching or the arrow keys tell the values of a moment, in all charts at once.

const AXIS_PARTS = 2;
const GAP_S = 35;
const STEPS = 60;
const NEAR = 0.015; // Share of the time shown within which the cursor is at a mark.

// The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`.
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

// The moment that is pointed at, as a share of the time shown; the charts share it.
class Cursor {
  constructor() {
    this.share = null;
    this.charts = [];
  }

  move(share) {
    this.share = share;
    for (const chart of this.charts) chart.drawCursor();
  }
}

// `series` is a list of {track, name, className}; `asValue` makes text of a value, `asAxis` of a label; `least` is the least
// top of the axis.
class Chart {
  constructor(cursor, { name, series, asValue, asAxis, least, top, empty }) {
    Object.assign(this, { cursor, series, asValue, asAxis: asAxis || asValue, least: least || 0, top, empty, lines: [], from: 0, to: 1 });
    cursor.charts.push(this);
    this.root = make("div", "chart");
    this.plot = make("div", "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "slider");
    this.plot.setAttribute("aria-label", `${name} over time`);
    this.plot.setAttribute("aria-valuemin", "0");
    this.plot.setAttribute("aria-valuemax", String(STEPS));
    this.svg = drawing("lines");
    this.svg.setAttribute("viewBox", "0 0 1000 100");
    this.down = this.path("down-time");
    for (let part = 0; part <= AXIS_PARTS; part += 1) {
      this.path("grid").setAttribute("d", `M0,${100 - (part * 100) / AXIS_PARTS}H1000`);
    }
    this.paths = series.map(({ className }) => [this.path(`area ${className}`), this.path(`line ${className}`)]);
    this.hair = make("i", "hair");
    this.dots = series.map(({ className }) => make("i", `spot ${className}`));
    this.nothing = make("span", "nothing", empty || "");
    this.deaths = make("div", "deaths");
    this.marks = [];
    this.plot.append(this.svg, this.deaths, this.hair, ...this.dots, this.nothing);
    this.tops = Array.from({ length: AXIS_PARTS + 1 }, (_, part) => {
      const label = make("span", "y");
      label.style.bottom = `${(part * 100) / AXIS_PARTS}%`;
      this.plot.append(label);
      return label;
    });
    this.times = make("div", "times");
    this.times.append(make("span"), make("span"), make("span"));
    this.root.append(this.plot, this.times);
    this.listen();
  }

  path(className) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", className);
    this.svg.append(path);
    return path;
  }

  listen() {
    const point = (event) => {
      const box = this.plot.getBoundingClientRect();
      this.cursor.move(Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)));
      this.tell();
    };
    const leave = () => {
      this.cursor.move(null);
      tip.hide();
    };
    this.plot.addEventListener("pointerdown", point);
    this.plot.addEventListener("pointermove", point);
    this.plot.addEventListener("pointerleave", leave);
    this.plot.addEventListener("blur", leave);
    this.plot.addEventListener("keydown", (event) => {
      const share = this.cursor.share ?? 1;
      const moved = { ArrowLeft: share - 1 / STEPS, ArrowRight: share + 1 / STEPS, Home: 0, End: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (moved === undefined) return;
      event.preventDefault();
      this.cursor.move(Math.max(0, Math.min(1, moved)));
      this.tell();
    });
  }

  // `lines` has a list of [time, value or null] for each series; `downs` are [from, to] in which a worker was down, `marks`
  // are [time, words] of moments at which one died.
  draw(lines, from, to, downs = [], marks = []) {
    Object.assign(this, { lines, from, to, marks });
    const values = lines.flat().map(([, value]) => value).filter(known);
    this.high = this.top || niceTop(Math.max(this.least, ...values));
    this.nothing.hidden = values.some((value) => value > 0);
    lines.forEach((points, at) => this.drawLine(points, ...this.paths[at]));
    this.down.setAttribute("d", downs.map(([begin, end]) => `M${this.x(begin)},100H${this.x(end)}V0H${this.x(begin)}Z`).join(""));
    this.tops.forEach((label, part) => setText(label, this.asAxis((this.high * part) / AXIS_PARTS)));
    const [first, middle, last] = this.times.children;
    setText(first, asAgo(to - from));
    setText(middle, asAgo((to - from) / 2));
    setText(last, "now");
    while (this.deaths.children.length < marks.length) this.deaths.append(make("i", "death"));
    while (this.deaths.children.length > marks.length) this.deaths.lastChild.remove();
    marks.forEach(([moment], at) => { this.deaths.children[at].style.left = `${this.x(moment) / 10}%`; });
    this.drawCursor();
    if (this.telling) this.tell();
  }

  x(time) {
    return ((time - this.from) / (this.to - this.from)) * 1000;
  }

  y(value) {
    return 100 - (Math.min(value, this.high) / this.high) * 100;
  }

  drawLine(points, area, line) {
    const parts = [];
    let last = null;
    for (const [time, value] of points) {
      if (!known(value)) {
        last = null;
        continue;
      }
      if (last === null || time - last > GAP_S) parts.push([]);
      parts[parts.length - 1].push([this.x(time).toFixed(1), this.y(value).toFixed(2)]);
      last = time;
    }
    line.setAttribute("d", parts.map((part) => `M${part.join("L")}${part.length < 2 ? "h0.1" : ""}`).join(""));
    area.setAttribute("d", parts.map((part) => `M${part[0][0]},100L${part.join("L")}L${part[part.length - 1][0]},100Z`).join(""));
  }

  nearest(points, time) {
    let best = null;
    for (const point of points) {
      if (known(point[1]) && (!best || Math.abs(point[0] - time) < Math.abs(best[0] - time))) best = point;
    }
    return best && Math.abs(best[0] - time) <= GAP_S ? best : null;
  }

  drawCursor() {
    const share = this.cursor.share;
    this.hair.hidden = share === null;
    if (share === null) this.telling = false;
    const time = this.from + (share || 0) * (this.to - this.from);
    this.hair.style.left = `${(share || 0) * 100}%`;
    this.dots.forEach((dot, at) => {
      const found = share === null ? null : this.nearest(this.lines[at] || [], time);
      dot.hidden = !found;
      if (!found) return;
      dot.style.left = `${this.x(found[0]) / 10}%`;
      dot.style.top = `${this.y(found[1])}%`;
    });
  }

  // Shows the values of the cursor's moment beside it.
  tell() {
    this.telling = true;
    const share = this.cursor.share;
    const time = this.from + share * (this.to - this.from);
    const found = this.series.map((one, at) => [one, this.nearest(this.lines[at], time)]);
    const rows = found.map(([one, point]) => {
      const row = make("p", "value");
      row.append(make("i", `swatch ${one.className}`), make("span", "", one.name), make("b", "", point ? this.asValue(point[1]) : "none"));
      return row;
    });
    const near = this.marks.filter(([moment]) => Math.abs(moment - time) <= (this.to - this.from) * NEAR).map(([, words]) => words);
    const box = this.plot.getBoundingClientRect();
    tip.show([make("p", "moment", asClock(time)), ...rows, ...near], box.left + share * box.width, box.top);
    this.plot.setAttribute("aria-valuenow", String(Math.round(share * STEPS)));
    const values = found.map(([one, point]) => `${one.name} ${point ? this.asValue(point[1]) : "none"}`);
    this.plot.setAttribute("aria-valuetext", `${asClock(time)}: ${[...values, ...near].join(", ")}`);
  }
}

// A chart without axes in the cell of a table; `series` is a list of [track, name, class].
class Spark {
  constructor(cell, name, least, asValue, series) {
    this.tracks = series.map(([track]) => track);
    this.chart = new Chart(new Cursor(), { name, least, asValue, series: series.map(([, label, className]) => ({ name: label, className })) });
    this.chart.root.classList.add("spark");
    cell.append(this.chart.root);
  }

  draw(past) {
    this.chart.draw(this.tracks.map((track) => past.points(track, LIVE_S)), past.now - LIVE_S, past.now);
  }
}
