// Elements and small charts. Text goes in as text only, so nothing that a client named can become markup.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setTone(element, tone) {
  if (element.dataset.tone !== tone) element.dataset.tone = tone;
}

function drawing(className, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", className);
  svg.setAttribute("preserveAspectRatio", "none");
  if (label) {
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
  } else {
    svg.setAttribute("aria-hidden", "true");
  }
  return svg;
}

// A line with the area under it; `values` are drawn from the left at even distances up to `slots` of them.
class Spark {
  constructor(slots, top) {
    this.slots = slots;
    this.top = top;
    this.svg = drawing("spark");
    this.svg.setAttribute("viewBox", `0 0 ${slots - 1} 100`);
    this.area = this.path("area");
    this.line = this.path("line");
  }

  path(className) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", className);
    this.svg.append(path);
    return path;
  }

  draw(values) {
    const top = this.top || Math.max(1e-9, ...values) * 1.15;
    const start = this.slots - values.length;
    const points = values.map((value, at) => `${start + at},${(98 - (Math.min(value, top) / top) * 94).toFixed(2)}`);
    if (points.length < 2) return;
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${start},100L${points.join("L")}L${this.slots - 1},100Z`);
  }
}

// Columns of equal width from the right, each as high as its share of 1.
class Columns {
  constructor(slots, label) {
    this.slots = slots;
    this.svg = drawing("bars", label);
    this.svg.setAttribute("viewBox", `0 0 ${slots * 5} 100`);
    this.rects = Array.from({ length: slots }, (_, at) => {
      const rect = document.createElementNS(SVG, "rect");
      rect.setAttribute("x", at * 5);
      rect.setAttribute("width", 4);
      this.svg.append(rect);
      return rect;
    });
  }

  draw(shares) {
    const start = this.slots - shares.length;
    this.rects.forEach((rect, at) => {
      const share = at < start ? 0 : Math.max(0.02, Math.min(1, shares[at - start]));
      rect.setAttribute("y", (100 - share * 100).toFixed(1));
      rect.setAttribute("height", (share * 100).toFixed(1));
    });
  }
}

// A labelled bar: how much of how much.
class Meter {
  constructor(label, markAt) {
    this.root = make("div", "meter");
    const row = make("div", "row");
    row.append(make("span", "", label));
    this.value = make("span");
    row.append(this.value);
    this.track = track(label);
    if (markAt) {
      const mark = make("b");
      mark.style.left = `${markAt}%`;
      mark.title = `Memory threshold: ${markAt} %`;
      this.track.append(mark);
    }
    this.root.append(row, this.track);
  }

  draw(share, text, tone) {
    setText(this.value, text);
    fillTrack(this.track, share, tone);
  }
}

function track(label) {
  const root = make("div", "track");
  root.setAttribute("role", "meter");
  root.setAttribute("aria-label", label);
  root.setAttribute("aria-valuemin", "0");
  root.setAttribute("aria-valuemax", "100");
  root.append(make("i"));
  return root;
}

function fillTrack(root, share, tone) {
  const percent = known(share) ? Math.max(0, Math.min(100, share * 100)) : 0;
  root.firstChild.style.width = `${percent.toFixed(1)}%`;
  root.setAttribute("aria-valuenow", percent.toFixed(0));
  setTone(root, tone || "plain");
}

// Keeps one child of `parent` per key, in the order given; `create` makes a new one, `update` fills it in.
class Keyed {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.known = new Map();
  }

  draw(entries, keyOf, update) {
    const wanted = new Set();
    entries.forEach((entry, at) => {
      const key = keyOf(entry);
      wanted.add(key);
      if (!this.known.has(key)) this.known.set(key, this.create(entry));
      const view = this.known.get(key);
      update(view, entry);
      if (this.parent.children[at] !== view.root) this.parent.insertBefore(view.root, this.parent.children[at] || null);
    });
    for (const [key, view] of this.known) {
      if (!wanted.has(key)) {
        view.root.remove();
        this.known.delete(key);
      }
    }
  }
}
