// Elements, bars and meters. Text goes in as text only, so nothing that a client named can become markup.

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

// Words that explain an element, shown when the element is pointed at or focused, and read to those who cannot see it.
function explain(element, words) {
  if (element.dataset.help === words) return;
  element.dataset.help = words;
  element.setAttribute("aria-description", words);
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
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const at = Math.floor(((event.clientX - box.left) / box.width) * this.slots) - (this.slots - (this.tells || []).length);
      const told = this.tells && this.tells[at];
      if (told) tip.show([told], event.clientX, box.top);
      else tip.hide();
    });
    this.svg.addEventListener("pointerleave", () => tip.hide());
  }

  draw(shares, tells) {
    const start = this.slots - shares.length;
    this.tells = tells;
    this.rects.forEach((rect, at) => {
      const share = at < start ? 0 : Math.max(0.02, Math.min(1, shares[at - start]));
      rect.setAttribute("y", (100 - share * 100).toFixed(1));
      rect.setAttribute("height", (share * 100).toFixed(1));
    });
  }
}

// A labelled bar: how much of how much.
class Meter {
  constructor(label, words, markAt) {
    this.root = make("div", "meter");
    const row = make("div", "row");
    row.append(term(label, words));
    this.value = make("span");
    row.append(this.value);
    this.track = track(label);
    if (markAt) {
      const mark = make("b");
      mark.style.left = `${markAt}%`;
      this.track.append(mark);
    }
    this.root.append(row, this.track);
  }

  draw(share, text, tone) {
    setText(this.value, text);
    fillTrack(this.track, share, tone);
  }
}

// A word with an explanation.
function term(label, words) {
  const element = make("span", "term", label);
  element.tabIndex = 0;
  explain(element, words);
  return element;
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
    const wanted = new Set(entries.map(keyOf));
    // First, so that no child moves because another one has gone: a child that moves loses the focus.
    for (const [key, view] of this.known) {
      if (!wanted.has(key)) {
        view.root.remove();
        this.known.delete(key);
      }
    }
    entries.forEach((entry, at) => {
      const key = keyOf(entry);
      if (!this.known.has(key)) this.known.set(key, this.create(entry));
      const view = this.known.get(key);
      update(view, entry);
      if (this.parent.children[at] !== view.root) this.parent.insertBefore(view.root, this.parent.children[at] || null);
    });
  }
}
